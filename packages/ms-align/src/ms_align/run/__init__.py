"""Training runs: the loop, checkpoints, the output folder and the trained model."""
