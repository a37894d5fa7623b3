"""Deployment targets, one package each: schemes, writer, reader and runtime."""
