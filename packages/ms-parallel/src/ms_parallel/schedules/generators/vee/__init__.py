"""Generators of V schedules: two stages per rank, down the ranks and back up."""
