"""Layouts of ms-parallel in settings; checking one needs no torch."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import fields

from ms_align.errors import ConfigError
from ms_align.settings import nearest, shown

if TYPE_CHECKING:
    from ms_parallel import Layout


def check_layout(value: Any) -> None:
    """Check that a layout is a table of ranks by axis, or in Python a Layout; None passes.

    Raises:
        ConfigError: it is neither.
    """
    if not (value is None or isinstance(value, Mapping) or hasattr(value, "world_size")):
        raise ConfigError(
            f"layout must be a table such as {{ data = 2, tensor = 2 }}, got {shown(value)}"
        )


def layout_of(given: "Layout | Mapping[str, int]") -> "Layout":
    """Build ms-parallel's layout from a table of ranks by axis.

    Raises:
        ConfigError: ms-parallel is not installed, has no such axis, or refuses the sizes.
    """
    try:
        from ms_parallel import Layout, ParallelError
    except ImportError as error:
        raise ConfigError(
            "a layout needs ms-parallel; install it with `pip install ms-align[parallel]`"
        ) from error
    if not isinstance(given, Mapping):
        return given
    axes = [each.name for each in fields(Layout)]
    for name in given:
        if name not in axes:
            raise ConfigError(f"layout has no axis {name!r}; {nearest(name, axes)}")
    try:
        return Layout(**given)
    except ParallelError as error:
        raise ConfigError(str(error)) from error
