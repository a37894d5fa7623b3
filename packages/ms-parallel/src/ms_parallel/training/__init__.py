"""Training runs: options, training loop, output folder and predicted resources."""
