"""How an optimizer's rules update the parts of the weights that a process holds."""
