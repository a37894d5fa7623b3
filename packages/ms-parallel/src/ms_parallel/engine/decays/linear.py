"""A straight line."""

NAME = "linear"


def share_left(passed: float) -> float:
    """The share of the fall that is still to come once a share `passed` of the updates is made."""
    return 1.0 - passed
