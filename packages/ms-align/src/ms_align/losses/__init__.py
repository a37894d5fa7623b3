"""Losses: formulas as pure functions, and the loss objects that engines call."""
