"""Formulas as pure functions, and the losses that engines call."""
