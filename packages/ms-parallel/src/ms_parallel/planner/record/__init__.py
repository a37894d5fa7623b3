"""Plans as files, and what runs that were planned have taken."""
