"""Processes of a run: layouts, process groups, launch, agreement, monitoring and exit."""
