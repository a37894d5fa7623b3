"""ms-parallel layouts in settings. Checking one does not import torch."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import fields

from ms_align.errors import ConfigError
from ms_align.settings import nearest, short_repr

if TYPE_CHECKING:
    from ms_parallel import Layout


def check_layout(value: Any) -> None:
    """Check that a `layout` setting is a table of ranks per axis, a Layout, or None.

    Raises:
        ConfigError: it has another type.
    """
    if not (value is None or isinstance(value, Mapping) or hasattr(value, "world_size")):
        raise ConfigError(
            f"layout must be a table such as {{ data = 2, tensor = 2 }}, got {short_repr(value)}; "
            "correct it"
        )


def layout_of(layout: "Layout | Mapping[str, int]") -> "Layout":
    """Build an ms-parallel layout from a table of ranks per axis.

    Raises:
        ConfigError: ms-parallel is not installed, an axis is unknown, or the sizes are invalid.
    """
    try:
        from ms_parallel import Layout, ParallelError
    except ImportError as error:
        raise ConfigError(
            "a layout needs ms-parallel; install it with `pip install ms-align[parallel]`"
        ) from error
    if not isinstance(layout, Mapping):
        return layout
    axes = [axis.name for axis in fields(Layout)]
    for name in layout:
        if name not in axes:
            raise ConfigError(f"layout has no axis {name!r}; {nearest(name, axes)}")
    try:
        return Layout(**layout)
    except ParallelError as error:
        raise ConfigError(str(error)) from error
