"""Plan files, and the measured time of planned runs."""
