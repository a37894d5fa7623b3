"""Choose a schedule for a model on its processes: measure, search, keep what was found, explain."""
