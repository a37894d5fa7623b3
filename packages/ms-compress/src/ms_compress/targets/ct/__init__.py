"""compressed-tensors folders, for transformers and vLLM."""
