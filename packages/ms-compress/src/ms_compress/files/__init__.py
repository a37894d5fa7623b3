"""Durable writes, reads of untrusted files, and run folders."""
