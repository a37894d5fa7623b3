"""Shared parts of the trainers."""
