"""Durable writes, checked reads of untrusted files, and locked run folders."""
