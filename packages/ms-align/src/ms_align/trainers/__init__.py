"""Trainers: each module here is an algorithm, and the command of its name; `frame` is shared."""
