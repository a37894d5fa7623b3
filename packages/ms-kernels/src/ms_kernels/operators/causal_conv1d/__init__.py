"""A short causal convolution of each channel, as layers with a recurrent state have before it."""
