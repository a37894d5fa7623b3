"""Chat templates and the messages of instruction sets."""
