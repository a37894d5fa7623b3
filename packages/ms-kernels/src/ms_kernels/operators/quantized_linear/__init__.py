"""A linear layer whose weight is packed in 4 or 8 bits; see `ms_kernels.packed_weights`."""
