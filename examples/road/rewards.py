"""Rewards of the road: a sum is right or it is not, and a control that knows nothing.

`ms-align ppo` finds them as `rewards:exact` where this folder is on PYTHONPATH.
"""

import random
from collections.abc import Sequence

from ms_align import ExactMatch, Sample

_RIGHT = ExactMatch()
_RNG = random.Random(0)


def exact(samples: Sequence[Sample]) -> list[float]:
    """1 where the response is the answer, else 0."""
    return _RIGHT(samples)


def shuffled(samples: Sequence[Sample]) -> list[float]:
    """The same numbers, dealt out among the samples at random: nothing can be learned from them."""
    rewards = exact(samples)
    _RNG.shuffle(rewards)
    return rewards
