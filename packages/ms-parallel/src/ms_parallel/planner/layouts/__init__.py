"""Search for the best layouts on a cluster: enumeration, memory, time, and choice."""
