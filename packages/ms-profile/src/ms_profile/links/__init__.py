"""Latency and bandwidth between every pair of ranks."""
