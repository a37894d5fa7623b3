"""Convert an event to a point: numbers, texts and settings."""

from collections.abc import Mapping
from typing import Protocol

from ms_profile.secret_text import without_secret
from ms_profile.trackers.destination import Point, Value


class OnEvent(Protocol):
    """Callable that receives an event: a kind and flat fields."""

    def __call__(self, kind: str, fields: Mapping[str, Value], /) -> None:
        """Receive one event."""


def point_of(kind: str, fields: Mapping[str, Value], *, wall_s: float) -> Point:
    """Convert an event to a point; fields that are neither numbers nor text are dropped.

    Args:
        kind: kind of the event, such as `step`.
        fields: flat fields; numpy and torch scalars are converted to numbers.
        wall_s: Unix time of the event.
    """
    numbers: dict[str, float] = {}
    texts: dict[str, str] = {}
    plain_fields = {
        # Scalars of numpy and torch become plain numbers, on the training's thread.
        name: value.item() if getattr(value, "ndim", None) == 0 else value  # type: ignore[union-attr]
        for name, value in fields.items()
    }
    step_field = plain_fields.get("step")
    step = int(step_field) if isinstance(step_field, int) else None
    for name, value in plain_fields.items():
        if name == "step" and step is not None:
            continue
        if isinstance(value, str):
            # Events without a step are settings, which every viewer of the tracker can see.
            shown = without_secret(name, value) if step is None else value
            texts[f"{kind}/{name}"] = shown
        elif isinstance(value, int | float):
            numbers[f"{kind}/{name}"] = value
    return Point(kind=kind, step=step, wall_s=wall_s, numbers=numbers, texts=texts)
