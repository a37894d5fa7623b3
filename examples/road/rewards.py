"""Rewards of the road: exact match, and a shuffled control that carries no information.

`ms-align ppo` finds them as `rewards:exact` if this folder is on PYTHONPATH.
"""

import random
from collections.abc import Sequence

from ms_align import ExactMatch, Sample

_EXACT = ExactMatch()
_RNG = random.Random(0)


def exact(samples: Sequence[Sample]) -> list[float]:
    """Return 1 where the response is the answer, else 0."""
    return _EXACT(samples)


def shuffled(samples: Sequence[Sample]) -> list[float]:
    """Return the same rewards in random order, so that nothing can be learned from them."""
    rewards = exact(samples)
    _RNG.shuffle(rewards)
    return rewards
