"""Responses to prompts, scored and turned into the rows that an update reads."""
