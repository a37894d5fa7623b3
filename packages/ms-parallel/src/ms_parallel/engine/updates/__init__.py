"""One update of an engine: its forwards and backwards, the scale of its loss, and its audit."""
