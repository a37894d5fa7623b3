"""Search for the shortest schedule: annealing, lower bounds, exact solver and layer split."""
