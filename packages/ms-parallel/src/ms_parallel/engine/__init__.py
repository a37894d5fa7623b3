"""The engine: a model, its optimizer and its processes behind one object."""
