"""A pass over a corpus: documents in, documents and a ledger out, on all cores, resumable."""
