"""Trainers, one file each: settings that are checked when they are built, and one verb."""
