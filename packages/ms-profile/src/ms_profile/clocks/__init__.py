"""The clocks of a process, and one time line for those of many."""
