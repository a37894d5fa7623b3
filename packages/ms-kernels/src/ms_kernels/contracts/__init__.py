"""Contracts of operators: arguments, options, cost, tolerance, and validation of calls."""
