"""Training runs: their options, their loop, their folder and what each will need."""
