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
    """Fraction of the steps after the warm-up over which the learning rate decays."""
    shape: Literal["linear", "sqrt"] = field(default="linear", validator=one_of("linear", "sqrt"))
    """Linear, or 1 - sqrt(t), which decays faster at first (Hägele et al., 2024)."""

    def remaining(self, progress: float) -> float:
        """Return the decay factor, from 1 to 0, at `progress` from 0 to 1."""
        elapsed = max(progress - (1.0 - self.share), 0.0) / self.share
        return 1.0 - min(math.sqrt(elapsed) if self.shape == "sqrt" else elapsed, 1.0)
