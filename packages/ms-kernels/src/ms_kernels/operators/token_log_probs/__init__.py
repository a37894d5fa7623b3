"""Log-probabilities of given tokens under ``hidden @ weight.T``, in chunks of logits."""
