"""Plans the layout and settings of a run for a cluster."""
