"""Imports torch without its warning about a missing numpy."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_numpy_warning() -> Iterator[None]:
    """Suppress torch's import warning about missing numpy, which this package does not need."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
        yield
