"""Recordings of machines, which can be judged anywhere."""
