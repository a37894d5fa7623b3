"""Runs on devices of several kinds: the device of each rank, and reductions between kinds."""
