"""Models that are not ours: whatever transformers builds, and any module with a plan."""
