"""Generators of schedules whose stages go round the ranks in a loop."""
