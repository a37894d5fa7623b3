"""Maps the n-th draw from a source to a sample, over all epochs, without stored state."""

import numpy as np
from numpy.typing import NDArray

from ms_data.streams.order import Order

WINDOW = 4096
"""Draws computed at a time."""


class DrawSequence:
    """Draws every sample once per epoch, in an order that depends on the seed and the epoch.

    Args:
        samples: number of samples in the source.
        seed: any integer.
        shuffle: False keeps the order of the corpus.
    """

    def __init__(self, samples: int, *, seed: int, shuffle: bool) -> None:
        self._order = Order(samples=samples, seed=seed, window_chunks=WINDOW, shuffle=shuffle)
        self._key = (-1, -1)
        self._window: NDArray[np.int64] = np.empty(0, np.int64)

    def __getitem__(self, draw: int) -> int:
        """Return the sample of draw number `draw`, counted from 0 over all epochs."""
        epoch, position = divmod(draw, self._order.samples)
        number, offset = divmod(position, WINDOW)
        # Draws are mostly sequential, so one cached window suffices.
        if self._key != (epoch, number):
            self._key, self._window = (epoch, number), self._order.window(epoch, number)
        return int(self._window[offset])
