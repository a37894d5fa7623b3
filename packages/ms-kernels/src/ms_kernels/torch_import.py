"""Imports torch in silence where numpy is missing, and not before it is needed."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_numpy_warning() -> Iterator[None]:
    """Keep torch from warning, as it is imported, that there is no numpy: nothing here needs it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
        yield
