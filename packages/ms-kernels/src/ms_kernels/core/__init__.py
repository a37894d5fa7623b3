"""How a call finds its implementation, and how one becomes an operator of torch.library."""
