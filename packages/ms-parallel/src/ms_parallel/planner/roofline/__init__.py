"""Predicts the time of a step on other devices from their rates and a few constants."""
