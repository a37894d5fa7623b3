"""Generators of schedules with looped stages."""
