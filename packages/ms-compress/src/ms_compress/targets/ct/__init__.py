"""Folders of compressed-tensors, for transformers and vLLM."""
