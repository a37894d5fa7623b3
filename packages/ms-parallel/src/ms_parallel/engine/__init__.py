"""The engine: one object for a model, its optimizer and its processes."""
