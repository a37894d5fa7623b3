"""The search for the shortest schedule: annealing, lower bounds, an exact solver, layer splits."""
