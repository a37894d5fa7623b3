"""What a plan chooses, what it leaves as it is given, and what it depends on."""

from typing import Any

from attrs import fields

from ms_parallel.training.options import AUTO, Options

PLANNED = ("schedule", "microbatch_size", "sharding", "recompute", "offload")
"""Settings that a plan chooses, unless they are given."""


def kept_settings(options: Options) -> dict[str, Any]:
    """Return the settings of `PLANNED` that are given: those that are not as by default."""
    defaults = {each.name: each.default for each in fields(Options)}
    given = {name: getattr(options, name) for name in PLANNED}
    asked = {"microbatch_size": (None, AUTO)}
    return {
        name: value
        for name, value in given.items()
        if value not in asked.get(name, (defaults[name],))
    }


def conditions_of(options: Options, devices: int) -> dict[str, int | str]:
    """Return what a plan depends on, as it stands in its file."""
    return {
        "model": options.model_arch,
        "model_config": str(sorted(options.model_config.items())),
        "batch_size": options.batch_size,
        "sequence_length": options.sequence_length,
        "mixed_precision": str(options.mixed_precision),
        "optimizer": str(options.optimizer),
        "memory_gib": str(options.memory_gib),
        "devices": devices,
        **{name: str(value) for name, value in kept_settings(options).items()},
    }
