"""Generators of schedules with one stage a rank."""
