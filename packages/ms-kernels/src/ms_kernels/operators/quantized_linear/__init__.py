"""Linear layer with a weight quantized to 4 or 8 bits; see `ms_kernels.packed_weights`."""
