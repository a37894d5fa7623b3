"""Settles `parallel_config = "auto"`: the layout that a run began with, or the best one now."""

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
    """Replace the layout `auto` by one that is chosen, with the settings that go with it.

    What was chosen lies in `output_dir`, and a run that goes on keeps it: on another number of
    processes, or with other settings that a plan depends on, it is chosen anew. All processes of
    the run call this.

    Args:
        options: the run's.
        shards: its dataset.
        emit: called with what is chosen.

    Raises:
        ConfigError: no layout fits, the cluster file is for another number of processes, or what
            was chosen before cannot be read.
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
        assert cluster is not None  # the first process's
        run = ToldRun.of(options)
        found = ask_plan(PlanQuestion(run=run, cluster=cluster, shards=told_path(shards)))
        # A list and a tuple, which are the same to another process, are not in its text.
        found = msgspec.structs.replace(found, conditions=conditions_of(options, world_size()))
        write_plan(options.output_dir / FILE, found)
        if found.constants is not None and not found.constants.known:
            logger.warning("warning: constants of the plan are %s", found.constants)
        return found

    return run_on_rank_zero(choose)


def _cluster(options: Options) -> Cluster | None:
    """Read the cluster of these machines, or measure it; what is measured, only rank 0 gets."""
    if options.cluster is None:
        return measure_cluster(pick_device(options.device))
    cluster = read_cluster(options.cluster)
    if cluster.devices != world_size():
        raise ConfigError(
            f"{options.cluster} has {cluster.devices} devices, and {world_size()} processes run;"
            " start as many, or leave cluster out and these machines are measured"
        )
    return cluster
