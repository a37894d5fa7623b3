"""Sections of `gpu.py`: each proves or measures one thing and writes one table."""
