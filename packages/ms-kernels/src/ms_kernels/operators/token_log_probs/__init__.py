"""Log-probabilities of chosen tokens under ``hidden @ weight.T``, in chunks of logits."""
