"""Models built by transformers, and the parts that user-defined modules share with them."""
