"""What the commands do, one file a command; each is a skin over public functions."""
