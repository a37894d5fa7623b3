"""Checks of a machine itself: devices, limits, memory, its clock and the folder of a run."""
