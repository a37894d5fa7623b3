"""Continues prompts: tokens in, tokens out, with the log-probability of each."""
