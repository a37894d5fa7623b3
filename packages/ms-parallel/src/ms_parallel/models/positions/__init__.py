"""Rotary position embeddings and sliding windows: tables, scaling, config.json settings."""
