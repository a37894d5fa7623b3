"""Resumable multi-process passes over a corpus, which write documents and a ledger."""
