"""How many rows of the global batch each data rank takes, and how that follows from its speed."""
