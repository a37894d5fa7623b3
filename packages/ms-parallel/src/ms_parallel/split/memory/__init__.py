"""What each block keeps for its backward, and where."""
