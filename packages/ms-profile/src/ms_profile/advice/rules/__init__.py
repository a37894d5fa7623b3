"""The rules of advice, one a file."""
