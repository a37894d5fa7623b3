"""Update rules of the optimizers, applied to the local parts of weights."""
