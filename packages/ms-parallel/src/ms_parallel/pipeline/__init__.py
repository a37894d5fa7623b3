"""Runs pipeline schedules: runtime, messages between ranks, and recordings of steps."""
