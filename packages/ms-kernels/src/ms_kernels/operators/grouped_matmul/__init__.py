"""One matrix product per group of consecutive rows: the experts of a mixture-of-experts layer."""
