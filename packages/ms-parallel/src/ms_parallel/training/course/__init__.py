"""A run as it goes: its log, checkpoints and audits, and what is done when it goes wrong."""
