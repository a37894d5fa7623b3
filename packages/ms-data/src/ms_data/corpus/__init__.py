"""A corpus on disk: which files it has, what they are, and the documents in them."""
