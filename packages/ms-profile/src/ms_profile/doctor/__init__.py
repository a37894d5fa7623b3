"""Examines machines and clusters for problems that break or slow down training."""
