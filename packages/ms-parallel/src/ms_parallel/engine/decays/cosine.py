"""Half a cosine: slow, fast, slow (Loshchilov and Hutter, 2017)."""

import math

from attrs import frozen

NAME = "cosine"


@frozen(kw_only=True)
class Decay:
    """Half a cosine."""

    def share_left(self, passed: float) -> float:
        """Return the share of the fall still to come once a share `passed` of updates is made."""
        return 0.5 * (1.0 + math.cos(math.pi * passed))
