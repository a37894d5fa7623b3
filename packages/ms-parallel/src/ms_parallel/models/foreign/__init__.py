"""Models that are not ours: transformers' models, and any module with a plan."""
