"""How a learning rate falls after its warm-up, a file each; `optimizer.decays` finds them."""
