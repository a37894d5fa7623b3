"""Linear decay from the peak learning rate to the floor."""

from attrs import frozen

NAME = "linear"


@frozen(kw_only=True)
class Decay:
    """Linear decay from the peak learning rate to the floor."""

    def remaining(self, progress: float) -> float:
        """Return the decay factor, from 1 to 0, at `progress` from 0 to 1."""
        return 1.0 - progress
