"""Options that several operators share."""

from ms_kernels.contract import Option

__all__ = ["eps_option", "scale_option", "window_option"]


def eps_option(default: float) -> Option:
    """What is added to a mean square or a variance."""
    return Option(
        name="eps",
        default=default,
        holds=lambda value: isinstance(value, float | int) and value >= 0,
        fits="a number, 0 or more",
        trials=(0.5,),
    )


window_option = Option(
    name="window",
    default=None,
    holds=lambda value: value is None or (isinstance(value, int) and value >= 1),
    fits="None or a whole number of positions, 1 or more",
    trials=(1, 7),
)

scale_option = Option(
    name="scale",
    default=None,
    holds=lambda value: value is None or isinstance(value, float | int),
    fits="None (for D ** -0.5) or a number",
    trials=(0.3,),
)
