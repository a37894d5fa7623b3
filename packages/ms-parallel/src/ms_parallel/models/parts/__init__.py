"""Parts that blocks are made of: norms, attention, feed-forwards, and the block itself."""
