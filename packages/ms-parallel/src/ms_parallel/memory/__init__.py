"""Activation checkpointing, offloading to host memory, memory budgets and estimates."""
