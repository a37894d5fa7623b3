"""Chat templates, and the message formats of instruction datasets."""
