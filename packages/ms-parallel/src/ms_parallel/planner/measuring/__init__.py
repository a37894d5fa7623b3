"""Measures the machines that it runs on, as a cluster file says them."""
