"""A run of a trainer: its loop, checkpoints, folder, and what it leaves behind."""
