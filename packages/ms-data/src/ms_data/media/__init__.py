"""Pictures and sound in messages: read, checked, decoded, and made what a model reads."""
