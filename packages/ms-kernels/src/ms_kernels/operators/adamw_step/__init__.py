"""In-place AdamW step (Loshchilov and Hutter, 2019), equivalent to `torch.optim.AdamW`."""
