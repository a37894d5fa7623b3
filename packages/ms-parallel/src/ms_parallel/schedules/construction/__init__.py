"""The list scheduler, and the orders and building blocks that guide it."""
