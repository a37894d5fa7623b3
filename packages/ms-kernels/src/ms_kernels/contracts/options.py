"""Options that several operators share."""

from ms_kernels.contracts.arguments import Option
from ms_kernels.contracts.values import is_integer, is_number


def flag(name: str, *, default: bool = False) -> Option:
    """Return an option that is True or False."""
    return Option(
        name=name,
        default=default,
        holds=lambda value: isinstance(value, bool),
        fits="True or False",
        trials=(not default,),
    )


def eps_option(default: float) -> Option:
    """Describe the option `eps`, which is added to a mean square or a variance."""
    return Option(
        name="eps",
        default=default,
        holds=lambda value: is_number(value, 0),
        fits="a number, 0 or more, finite in float32",
        trials=(0.5,),
    )


window_option = Option(
    name="window",
    default=None,
    holds=lambda value: value is None or is_integer(value, 1),
    fits="None or an integer of at least 1",
    kind=int | None,
    trials=(1, 7),
)

scale_option = Option(
    name="scale",
    default=None,
    holds=lambda value: value is None or is_number(value),
    fits="None (for D ** -0.5) or a number, finite in float32",
    kind=float | None,
    trials=(0.3,),
)

ignore_index_option = Option(
    name="ignore_index",
    default=-100,
    holds=is_integer,
    fits="a 64-bit integer",
)
