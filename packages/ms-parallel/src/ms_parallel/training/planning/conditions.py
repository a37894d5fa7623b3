"""Settings that a plan chooses, and settings that it depends on."""

from typing import Any

from attrs import fields

from ms_parallel.training.options import AUTO, Options

PLANNED = ("schedule", "microbatch_size", "sharding", "recompute", "offload")
"""Settings that a plan chooses unless they are set explicitly."""


def explicit_settings(options: Options) -> dict[str, Any]:
    """Return the settings in `PLANNED` that differ from their defaults."""
    defaults = {option.name: option.default for option in fields(Options)}
    values = {name: getattr(options, name) for name in PLANNED}
    unset = {"microbatch_size": (None, AUTO)}
    return {
        name: value
        for name, value in values.items()
        if value not in unset.get(name, (defaults[name],))
    }


def conditions_of(options: Options, devices: int) -> dict[str, int | str]:
    """Return all settings that a plan depends on, as stored in its file."""
    return {
        "model": options.model_arch,
        "model_config": str(sorted(options.model_config.items())),
        "batch_size": options.batch_size,
        "sequence_length": options.sequence_length,
        "mixed_precision": str(options.mixed_precision),
        "optimizer": str(options.optimizer),
        "memory_gib": str(options.memory_gib),
        "devices": devices,
        **{name: str(value) for name, value in explicit_settings(options).items()},
    }
