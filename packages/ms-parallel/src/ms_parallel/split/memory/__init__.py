"""Activation memory: checkpointing of blocks, memory budgets and offloading to host memory."""
