"""Expert load balancing: counts tokens per expert, balances them, and reports the load."""
