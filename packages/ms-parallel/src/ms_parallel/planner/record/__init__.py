"""Plans as files, and the time and memory that planned runs really took."""
