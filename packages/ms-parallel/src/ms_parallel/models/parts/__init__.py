"""Building blocks of decoders: norms, attention, feed-forwards, and the decoder block."""
