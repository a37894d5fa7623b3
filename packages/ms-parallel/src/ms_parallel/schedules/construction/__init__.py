"""List scheduler, and the policies and building blocks that guide it."""
