"""What runs in the sandbox's own interpreter: the standard library alone, and none of ms_align."""
