"""Proofs that a schedule is complete, ordered, and free of deadlock."""
