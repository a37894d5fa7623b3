"""Output of `clean` and `dedup`: documents, and a ledger with the outcome of each."""
