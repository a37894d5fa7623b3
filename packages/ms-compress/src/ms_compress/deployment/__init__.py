"""Export a prepared model as a folder for its target, and verify that the runtime agrees."""
