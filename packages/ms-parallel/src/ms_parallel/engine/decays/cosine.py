"""Half-cosine decay (Loshchilov and Hutter, 2017)."""

import math

from attrs import frozen

NAME = "cosine"


@frozen(kw_only=True)
class Decay:
    """Half-cosine decay: slow at first and at the end."""

    def remaining(self, progress: float) -> float:
        """Return the decay factor, from 1 to 0, at `progress` from 0 to 1."""
        return 0.5 * (1.0 + math.cos(math.pi * progress))
