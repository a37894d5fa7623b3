"""Sections of `gpu.py`: each checks or measures one thing and writes one table."""
