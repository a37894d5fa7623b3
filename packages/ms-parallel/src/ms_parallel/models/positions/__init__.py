"""Rotary positions and sliding windows: tables, scaling, and their settings in config.json."""
