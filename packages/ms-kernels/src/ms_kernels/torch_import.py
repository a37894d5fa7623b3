"""How torch is imported: not before it is needed, and in silence where numpy is missing."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["without_numpy_warning"]


@contextmanager
def without_numpy_warning() -> Iterator[None]:
    """Keep torch from warning, as it is imported, that there is no numpy: nothing here needs it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
        yield
