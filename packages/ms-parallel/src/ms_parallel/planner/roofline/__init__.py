"""Predicts the time of a step on devices that are not here, from their rates and few constants."""
