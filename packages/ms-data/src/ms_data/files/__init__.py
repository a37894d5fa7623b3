"""Durable writes, and checked reads of files that may be damaged or untrusted."""
