"""Checks if an engine supports a model under a layout, without starting its processes."""

from typing import Any

import msgspec

from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.engine import Engine
from ms_parallel.errors import ParallelError
from ms_parallel.models.registry import architecture
from ms_parallel.planner.fake_cluster import fake_pipeline, in_process_group
from ms_parallel.planner.subprocess_call import call_in_subprocess

REFUSAL = "ms_parallel.planner.refusal:refusal"


class LayoutArguments(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="layout.v1"
):
    """Arguments of `refusal`: a model, a layout and engine options."""

    model: str
    """Architecture name, or a folder with a config.json."""
    layout: Layout
    """Layout for any number of processes."""
    options: dict[str, str]


def refusal(arguments: LayoutArguments) -> str | None:
    """Error message of the first pipeline rank that rejects the layout; None if all accept it.

    Properties of the batch, such as the sequence length, are not checked. A process that is in a
    process group runs the check in a subprocess.
    """
    if in_process_group():
        message: str | None = call_in_subprocess(REFUSAL, arguments, str | None)
        return message
    config = architecture(arguments.model)
    options: dict[str, Any] = dict(arguments.options)
    try:
        with fake_pipeline(arguments.layout, options.get("sharding", "auto")) as ranks:
            for groups in ranks:
                engine = Engine(config, groups=groups, weights="unset", **options)
                engine.tables.training(2 * len(ranks))
    except ParallelError as error:
        return str(error)
    return None
