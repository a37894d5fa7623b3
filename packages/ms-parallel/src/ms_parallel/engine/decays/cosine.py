"""Half a cosine: slow, fast, slow (Loshchilov and Hutter, 2017)."""

import math

NAME = "cosine"


def share_left(passed: float) -> float:
    """The share of the fall that is still to come once a share `passed` of the updates is made."""
    return 0.5 * (1.0 + math.cos(math.pi * passed))
