"""Performs a schedule on the processes of a pipeline: runtime, messages, and times of a step."""
