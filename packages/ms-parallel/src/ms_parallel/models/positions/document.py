"""Rotary positions in config.json: the old spelling and the new one."""

from collections.abc import Mapping
from typing import Any

from ms_parallel.errors import ModelError
from ms_parallel.models.positions.scaling import RopeScaling

__all__ = ["read_rope", "write_scaling"]

_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_ROPE = {"rope_theta", "rope_type", "type", "partial_rotary_factor", *_LLAMA3}


def read_rope(given: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from the old spelling (rope_theta, rope_scaling) or rope_parameters.

    Raises:
        ModelError: they are not supported, or the two spellings differ.
    """
    new, old = given.get("rope_parameters"), given.get("rope_scaling")
    if new and old and new != old:
        raise ModelError(
            "rope_parameters and rope_scaling differ, and readers disagree on which holds; keep one"
        )
    rope = new or old or {}
    unknown = sorted(set(rope) - _ROPE) if isinstance(rope, dict) else [rope]
    if unknown:
        shown = repr(unknown[0])[:60]
        raise ModelError(f"rotary setting {shown} is not supported; known: {sorted(_ROPE)}")
    theta = rope.get("rope_theta", given.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(
            f"partial_rotary_factor={repr(rope['partial_rotary_factor'])[:60]} is not supported;"
            " only 1.0 is"
        )
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3"):
        shown = repr(kind)[:60]
        raise ModelError(f"rope_type {shown} is not supported; supported: default, linear, llama3")
    names = _LLAMA3 if kind == "llama3" else ("factor",)
    missing = [name for name in names if name not in rope]
    if missing:
        raise ModelError(f"rope scaling {kind!r} lacks {missing[0]!r}; add it to config.json")
    return theta, RopeScaling(kind=kind, **{name: rope[name] for name in names})


def write_scaling(scaling: RopeScaling | None) -> dict[str, object] | None:
    """The `rope_scaling` of config.json."""
    if scaling is None:
        return None
    names = _LLAMA3 if scaling.kind == "llama3" else ("factor",)
    return {"rope_type": scaling.kind, **{name: getattr(scaling, name) for name in names}}
