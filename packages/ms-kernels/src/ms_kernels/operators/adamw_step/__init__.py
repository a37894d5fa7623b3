"""One step of AdamW (Loshchilov and Hutter, 2019), in place, as `torch.optim.AdamW` takes it."""
