"""Generators of schedules with two stages a rank, down the ranks and back up."""
