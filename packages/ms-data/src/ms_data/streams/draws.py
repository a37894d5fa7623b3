"""Finds the n-th sample drawn from a source, epoch after epoch, by arithmetic."""

import numpy as np
from numpy.typing import NDArray

from ms_data.streams.order import Order

WINDOW = 4096
"""Draws that are computed at once."""


class Draws:
    """Draws every sample once an epoch, each epoch in another order that the seed decides.

    Args:
        samples: samples in the source.
        seed: any integer.
        shuffle: False draws in the order of the corpus.
    """

    def __init__(self, samples: int, *, seed: int, shuffle: bool) -> None:
        self._order = Order(samples=samples, seed=seed, window_chunks=WINDOW, shuffle=shuffle)
        self._key = (-1, -1)
        self._window: NDArray[np.int64] = np.empty(0, np.int64)

    def __getitem__(self, draw: int) -> int:
        """Return the sample of draw number `draw`, counted from 0 over all epochs."""
        epoch, position = divmod(draw, self._order.samples)
        number, offset = divmod(position, WINDOW)
        if self._key != (epoch, number):
            self._key, self._window = (epoch, number), self._order.window(epoch, number)
        return int(self._window[offset])
