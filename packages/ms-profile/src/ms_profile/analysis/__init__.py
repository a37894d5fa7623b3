"""What the traces of a run show together: time by cause, collectives, waiting, operators."""
