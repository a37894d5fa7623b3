"""Live page of running and finished runs, served on loopback."""
