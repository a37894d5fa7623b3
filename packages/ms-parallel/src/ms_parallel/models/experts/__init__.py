"""Mixtures of experts: routers, what they choose, the experts, and how load is balanced."""
