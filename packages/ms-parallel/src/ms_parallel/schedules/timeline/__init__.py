"""Timelines of a schedule: simulated with given costs, or measured in a run."""
