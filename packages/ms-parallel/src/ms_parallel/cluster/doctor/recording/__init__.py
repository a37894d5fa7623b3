"""What is known of the machines: recorded where they are, judged anywhere."""
