"""The gate of a SwiGLU feed-forward block (Shazeer, 2020)."""
