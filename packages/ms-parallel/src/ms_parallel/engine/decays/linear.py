"""A straight line from the highest rate to the least."""

from attrs import frozen

NAME = "linear"


@frozen(kw_only=True)
class Decay:
    """A straight line from the highest rate to the least."""

    def share_left(self, passed: float) -> float:
        """Return the share of the fall still to come once a share `passed` of updates is made."""
        return 1.0 - passed
