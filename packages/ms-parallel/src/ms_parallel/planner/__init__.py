"""Chooses a schedule for a model on its processes: measures, searches, keeps, explains."""
