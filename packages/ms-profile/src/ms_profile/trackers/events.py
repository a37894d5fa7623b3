"""One event as a point: what of it is a curve, a text or a setting."""

from collections.abc import Mapping
from typing import Protocol

from ms_profile.secret_text import without_secret
from ms_profile.trackers.destination import Point, Value


class OnEvent(Protocol):
    """Takes an event: a kind, and flat fields."""

    def __call__(self, kind: str, fields: Mapping[str, Value], /) -> None:
        """Take one event."""


def point_of(kind: str, fields: Mapping[str, Value], *, wall_s: float) -> Point:
    """Return the point of an event; fields that are neither number nor text are left out.

    Args:
        kind: such as `step`.
        fields: flat; a numpy or torch scalar counts as its number.
        wall_s: Unix time.
    """
    numbers: dict[str, float] = {}
    texts: dict[str, str] = {}
    plain = {
        name: given.item() if getattr(given, "ndim", None) == 0 else given  # type: ignore[union-attr]
        for name, given in fields.items()
    }
    found = plain.get("step")
    step = int(found) if isinstance(found, int) else None
    for name, value in plain.items():
        if name == "step" and step is not None:
            continue
        if isinstance(value, str):
            # Events without a step hold settings, which every viewer of a tracker sees.
            shown = without_secret(name, value) if step is None else value
            texts[f"{kind}/{name}"] = shown
        elif isinstance(value, int | float):
            numbers[f"{kind}/{name}"] = value
    return Point(kind=kind, step=step, wall_s=wall_s, numbers=numbers, texts=texts)
