"""Why an engine does not take a model under a layout, without any of its processes."""

from typing import Any

import msgspec

from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.engine import Engine
from ms_parallel.errors import ParallelError
from ms_parallel.models.registry import architecture
from ms_parallel.planner.apart import call_in_subprocess
from ms_parallel.planner.fake_cluster import fake_pipeline, in_process_group

REFUSAL = "ms_parallel.planner.refusal:refusal"


class LayoutQuestion(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="layout.v1"
):
    """A model under a layout, and options of its engine."""

    model: str
    """A family, or a folder with a config.json."""
    layout: Layout
    """How it is split, over any number of processes."""
    options: dict[str, str]


def refusal(question: LayoutQuestion) -> str | None:
    """Say why the engine of some pipeline rank refuses a layout; None where all accept it.

    What follows from a batch, such as a row's length, is not asked. A process that has met others
    asks another one.
    """
    if in_process_group():
        found: str | None = call_in_subprocess(REFUSAL, question, str | None)
        return found
    config = architecture(question.model)
    options: dict[str, Any] = dict(question.options)
    try:
        with fake_pipeline(question.layout, options.get("sharding", "auto")) as ranks:
            for here in ranks:
                engine = Engine(config, groups=here, weights="unset", **options)
                engine.tables.training(2 * len(ranks))
    except ParallelError as error:
        return str(error)
    return None
