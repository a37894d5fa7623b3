"""Rotary settings in config.json, in the old format and the new one."""

from collections.abc import Mapping
from typing import Any, Protocol, get_args

from ms_parallel.errors import ModelError
from ms_parallel.models.positions.scaling import OPTIONAL, REQUIRED, Kind, RopeScaling

_ROPE = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}.union(
    *REQUIRED.values(), *OPTIONAL.values()
)


class RopeFormat(Protocol):
    """Reader and writer of a family's rotary settings."""

    keys: frozenset[str]
    """Keys of config.json that it reads in addition to the common ones."""

    def read(self, config_json: Mapping[str, Any]) -> dict[str, Any]:
        """Return configuration settings, given a config.json with the family's defaults."""

    def write(self, config: Any) -> dict[str, object]:
        """Return the rotary settings for config.json."""


class SharedRope:
    """One set of rotary settings for all layers.

    Args:
        partial: whether the configuration has `partial_rotary_factor`.
    """

    def __init__(self, *, partial: bool = False) -> None:
        self.partial = partial
        self.keys = frozenset({"partial_rotary_factor"}) if partial else frozenset()

    def read(self, config_json: Mapping[str, Any]) -> dict[str, Any]:
        """Read base, scaling and, if supported, partial_rotary_factor."""
        rope = rope_section(config_json)
        factor = rope.get("partial_rotary_factor", config_json.get("partial_rotary_factor", 1.0))
        theta, scaling = read_rope(rope, config_json.get("rope_theta", 10000.0))
        if self.partial:
            return {
                "rope_theta": theta,
                "rope_scaling": scaling,
                "partial_rotary_factor": factor,
            }
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise ModelError(
                f"partial_rotary_factor must be 1.0 for this model, got {repr(factor)[:60]}"
            )
        return {"rope_theta": theta, "rope_scaling": scaling}

    def write(self, config: Any) -> dict[str, object]:
        """Return the settings in the old format, which all versions of transformers read."""
        return {
            "rope_theta": config.rope_theta,
            "rope_scaling": write_scaling(config.rope_scaling),
        }


SHARED_ROPE = SharedRope()
"""Rotary settings of Llama."""


def rope_section(config_json: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rotary settings of a config.json, in the old or the new format.

    Raises:
        ModelError: both formats are present and differ, or the value is not a mapping.
    """
    # transformers 5 writes rope_parameters, earlier versions rope_scaling.
    new, old = config_json.get("rope_parameters"), config_json.get("rope_scaling")
    if new and old and new != old:
        raise ModelError(
            "rope_parameters and rope_scaling must be equal if config.json has both; remove one"
        )
    rope = new or old or {}
    if not isinstance(rope, dict):
        shown = repr(rope)[:60]
        raise ModelError(f"rotary setting {shown} is not supported; known: {sorted(_ROPE)}")
    return rope


def read_rope(rope: Mapping[str, Any], theta: float) -> tuple[float, RopeScaling | None]:
    """Read base and scaling from one mapping of rotary settings.

    Args:
        rope: `rope_parameters`, `rope_scaling`, or their entry for some layers.
        theta: Default base.

    Raises:
        ModelError: a setting is missing or not supported.
        ConfigError: a value is out of range.
    """
    unknown = sorted(set(rope) - _ROPE)
    if unknown:
        shown = repr(unknown[0])[:60]
        raise ModelError(f"rotary setting {shown} is not supported; known: {sorted(_ROPE)}")
    theta = rope.get("rope_theta", theta)
    # `type` is the older name of `rope_type`.
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind not in get_args(Kind):
        supported = ", ".join(("default", *get_args(Kind)))
        raise ModelError(f"rope_type {repr(kind)[:60]} is not supported; supported: {supported}")
    missing = [name for name in REQUIRED[kind] if name not in rope]
    if missing:
        raise ModelError(f"rope scaling {kind!r} needs {missing[0]!r}; add it to config.json")
    parameters = {name: rope[name] for name in REQUIRED[kind]}
    parameters |= {
        name: rope[name] for name in OPTIONAL.get(kind, ()) if rope.get(name) is not None
    }
    return theta, RopeScaling(kind=kind, **parameters)


def write_scaling(scaling: RopeScaling | None) -> dict[str, object] | None:
    """Return the `rope_scaling` of config.json."""
    if scaling is None:
        return None
    document: dict[str, object] = {"rope_type": scaling.kind}
    document |= {name: getattr(scaling, name) for name in REQUIRED[scaling.kind]}
    optional = {name: getattr(scaling, name) for name in OPTIONAL.get(scaling.kind, ())}
    return document | {
        name: value
        for name, value in optional.items()
        if value is not None and (name, value) != ("truncate", True)
    }
