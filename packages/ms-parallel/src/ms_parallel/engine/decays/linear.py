"""Linear decay from the peak learning rate to the floor."""

from attrs import frozen

NAME = "linear"


@frozen(kw_only=True)
class Decay:
    """Linear decay from the peak learning rate to the floor."""

    def share_left(self, passed: float) -> float:
        """Return the remaining share of the decay after a share `passed` of the updates."""
        return 1.0 - passed
