"""Code inside the sandbox's interpreter; uses the standard library and nothing of ms_align."""
