"""Resolves `parallel_config = "auto"` to the run's earlier layout or to a new plan."""

import logging
from pathlib import Path

import msgspec
from attrs import evolve

from ms_parallel.cluster.agreement import run_on_rank_zero
from ms_parallel.cluster.device import pick_device
from ms_parallel.cluster.layout import Layout
from ms_parallel.cluster.process import world_size
from ms_parallel.errors import ConfigError
from ms_parallel.events import OnEvent
from ms_parallel.planner.cluster import Cluster, read_cluster
from ms_parallel.planner.measuring.machines import measure_cluster
from ms_parallel.planner.record.plan_file import FILE, Plan, read_plan, write_plan
from ms_parallel.training.options import AUTO, Options
from ms_parallel.training.planning.conditions import conditions_of
from ms_parallel.training.planning.questions import PlanQuestion, ToldRun, ask_plan, told_path

logger = logging.getLogger(__name__)


def with_layout(options: Options, shards: Path, emit: OnEvent) -> Options:
    """Replace the layout `auto` with a planned one, and apply the settings of the plan.

    The plan is stored in `output_dir` and reused when the run resumes, unless the number of
    processes or a setting that plans depend on has changed. All processes call this.

    Args:
        options: options of the run.
        shards: its dataset.
        emit: called with the `plan` event.

    Raises:
        ConfigError: no layout fits, the cluster file is for another number of processes, or the
            stored plan cannot be read.
    """
    if options.parallel_config != AUTO:
        return options
    known = run_on_rank_zero(lambda: _known(options))
    found = known or _planned(options, shards)
    best = found.best[0]
    emit(
        "plan",
        {
            "layout": str(Layout(**best.layout)),
            **best.settings,
            "predicted_step_s": best.step.total,
            "kept": int(known is not None),
        },
    )
    return evolve(options, parallel_config=Layout(**best.layout), **best.settings)  # type: ignore[arg-type]  # its own settings


def _known(options: Options) -> Plan | None:
    found = read_plan(options.output_dir / FILE)
    return found if found and found.conditions == conditions_of(options, world_size()) else None


def _planned(options: Options, shards: Path) -> Plan:
    cluster = _cluster(options)

    def choose() -> Plan:
        assert cluster is not None  # this runs on rank 0
        run = ToldRun.of(options)
        found = ask_plan(PlanQuestion(run=run, cluster=cluster, shards=told_path(shards)))
        # Computed here: the planning process has lists where these options have tuples.
        found = msgspec.structs.replace(found, conditions=conditions_of(options, world_size()))
        write_plan(options.output_dir / FILE, found)
        if found.constants is not None and not found.constants.known:
            logger.warning("warning: constants of the plan are %s", found.constants)
        return found

    return run_on_rank_zero(choose)


def _cluster(options: Options) -> Cluster | None:
    """Read the cluster file, or measure these machines; only rank 0 gets a measured cluster."""
    if options.cluster is None:
        return measure_cluster(pick_device(options.device))
    cluster = read_cluster(options.cluster)
    if cluster.devices != world_size():
        raise ConfigError(
            f"{options.cluster} has {cluster.devices} devices, and {world_size()} processes run;"
            " start as many, or leave cluster out and these machines are measured"
        )
    return cluster
