"""Learning rate decays after the warm-up, one per file; registered by `optimizer.decays`."""
