"""Checks of the network: ports, rates, packet sizes, and the variables that select them."""
