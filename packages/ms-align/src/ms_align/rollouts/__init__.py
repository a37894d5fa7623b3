"""Rollouts: responses to prompts, scored and turned into training batches."""
