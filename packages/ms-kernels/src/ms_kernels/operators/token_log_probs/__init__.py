"""Log-probabilities of chosen tokens under ``hidden @ weight.T``, a chunk of logits at a time."""
