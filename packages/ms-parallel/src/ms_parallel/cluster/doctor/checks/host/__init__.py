"""Checks of a machine: devices, limits, memory, clock and the output folder."""
