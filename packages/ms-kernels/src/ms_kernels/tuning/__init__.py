"""Creates a chip's tuning table by benchmarking its implementations and kernels."""
