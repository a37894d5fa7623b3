"""Warmup-stable-decay (WSD): constant for most updates, then a decay (Hu et al., 2024)."""

import math
from typing import Literal

from attrs import field, frozen

from ms_parallel.settings import number, one_of

NAME = "wsd"


@frozen(kw_only=True)
class Decay:
    """Constant learning rate after the warm-up, with a decay over the last updates.

    Raises:
        ConfigError: a value is out of range.
    """

    share: float = field(default=0.2, validator=number(minimum=1e-9, maximum=1.0))
    """Share of the updates after the warm-up over which the rate falls."""
    shape: Literal["linear", "sqrt"] = field(default="linear", validator=one_of("linear", "sqrt"))
    """A straight line, or 1 - sqrt(t), which falls faster at first (Hägele et al., 2024)."""

    def share_left(self, passed: float) -> float:
        """Return the remaining share of the decay after a share `passed` of the updates."""
        progress = max(passed - (1.0 - self.share), 0.0) / self.share
        return 1.0 - min(math.sqrt(progress) if self.shape == "sqrt" else progress, 1.0)
