"""What an operator is: its arguments, options, cost and tolerance, and what a call may pass."""
