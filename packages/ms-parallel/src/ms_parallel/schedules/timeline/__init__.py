"""When each action runs: simulated with given costs, or measured in a run."""
