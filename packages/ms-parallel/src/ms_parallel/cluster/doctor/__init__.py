"""Examines machines and clusters for what keeps training from running, or from running fast."""
