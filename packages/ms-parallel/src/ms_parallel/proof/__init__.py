"""Proves a model under drawn layouts against one process: every gradient, and nothing leaks."""
