"""One matrix product for each group of consecutive rows: the experts of a mixture."""
