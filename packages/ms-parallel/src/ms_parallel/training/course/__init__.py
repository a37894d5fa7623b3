"""What is told of a run as it goes, and what is done when it goes wrong."""
