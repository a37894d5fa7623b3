"""Half-cosine decay (Loshchilov and Hutter, 2017)."""

import math

from attrs import frozen

NAME = "cosine"


@frozen(kw_only=True)
class Decay:
    """Half-cosine decay: slow at first and at the end."""

    def share_left(self, passed: float) -> float:
        """Return the remaining share of the decay after a share `passed` of the updates."""
        return 0.5 * (1.0 + math.cos(math.pi * passed))
