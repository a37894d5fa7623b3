"""Export: a prepared model as a folder that its target runs, and the proof that it does."""
