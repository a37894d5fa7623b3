"""Generators of schedules with one stage per rank."""
