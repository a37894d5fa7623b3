"""Short depthwise causal convolution, as used before the recurrence in state-space layers."""
