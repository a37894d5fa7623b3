"""Reward functions, and the sandbox that runs generated code."""
