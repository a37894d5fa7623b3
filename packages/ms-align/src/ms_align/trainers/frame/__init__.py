"""What trainers share."""
