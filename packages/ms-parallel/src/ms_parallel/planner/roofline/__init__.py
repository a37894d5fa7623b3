"""Predict the time of a step on devices that are not here: from their figures and few constants."""
