"""One algorithm, one file, one pure loss function, and the value that an engine calls."""
