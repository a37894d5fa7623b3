"""Makes the tuning table of a chip by measuring its implementations and kernels."""
