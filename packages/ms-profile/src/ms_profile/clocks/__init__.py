"""Clock pairs of a process, and alignment of the clocks of several ranks."""
