"""The work of the commands, one file a command; each is a skin over public functions."""
