"""Plans a run for a cluster, beforehand or when it begins."""
