"""Trainers: one module per algorithm, with a command of the same name; `frame` has shared code."""
