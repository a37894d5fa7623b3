"""Why an engine does not take a model under a layout, without any of its processes."""

from collections.abc import Mapping
from typing import Any

from attrs import evolve

from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.assembly import sharded_layout
from ms_parallel.engine.engine import Engine
from ms_parallel.errors import ParallelError
from ms_parallel.models.config import ModelConfig
from ms_parallel.planner.apart import call_apart
from ms_parallel.planner.fake_cluster import fake_groups, has_met_others

REFUSAL = "ms_parallel.planner.refusal:refusal"


def refusal(config: ModelConfig, layout: Layout, options: Mapping[str, Any]) -> str | None:
    """Say why the engine of some pipeline rank refuses a layout; None where all accept it.

    What follows from a batch, such as a row's length, is not asked. A process that has met others
    asks another one.

    Args:
        config: of the model.
        layout: of any number of processes.
        options: of the engine.
    """
    if has_met_others():
        found: str | None = call_apart(
            "ms_parallel.planner.refusal:refusal", config, layout, options
        )
        return found
    try:
        layout = sharded_layout(layout, options.get("sharding", "auto"))
        with fake_groups(layout) as groups:
            stride = layout.world_size // layout.pipeline
            for pipeline in range(layout.pipeline):
                here = evolve(groups, place=layout.place(pipeline * stride))
                engine = Engine(config, groups=here, weights="unset", **options)
                engine.tables.training(2 * layout.pipeline)
    except ParallelError as error:
        return str(error)
    return None
