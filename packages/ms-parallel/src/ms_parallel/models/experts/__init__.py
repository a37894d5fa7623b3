"""Mixtures of experts: routers, expert layers, and load balancing."""
