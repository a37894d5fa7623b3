"""The proofs that a schedule is complete, in order, and free of deadlock."""
