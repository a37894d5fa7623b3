"""Settings: the validators of their values, and the run files that hold them."""
