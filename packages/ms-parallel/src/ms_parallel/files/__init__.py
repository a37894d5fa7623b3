"""Writes files that last, reads files that others wrote, and holds a run's folder."""
