"""Trainers: each module is one algorithm and the command of the same name; `frame` is shared."""
