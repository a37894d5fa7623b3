"""Training data as trainers read it."""
