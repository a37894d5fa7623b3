"""Resolves `parallel_config = "auto"` to the run's earlier layout or to a new plan."""

import logging
from pathlib import Path

import msgspec
import torch
from attrs import evolve

from ms_parallel.cluster.agreement import run_on_rank_zero
from ms_parallel.cluster.device import pick_device
from ms_parallel.cluster.layout import Layout
from ms_parallel.cluster.process import world_size
from ms_parallel.errors import ConfigError, LaunchError
from ms_parallel.events import OnEvent
from ms_parallel.planner.cluster import Cluster, parse_cluster, read_cluster
from ms_parallel.planner.record.plan_file import FILE, Plan, read_plan, write_plan
from ms_parallel.training.options import AUTO, Options
from ms_parallel.training.planning.conditions import conditions_of
from ms_parallel.training.planning.subprocesses import (
    PlanArguments,
    RunRecord,
    ask_plan,
    encode_path,
)

logger = logging.getLogger(__name__)


def resolve_layout(options: Options, shards: Path, emit: OnEvent) -> Options:
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
    stored = run_on_rank_zero(lambda: _stored(options))
    plan = stored or _plan(options, shards)
    best = plan.best[0]
    emit(
        "plan",
        {
            "layout": str(Layout(**best.layout)),
            **best.settings,
            "predicted_step_s": best.step.total,
            "kept": int(stored is not None),
        },
    )
    return evolve(options, parallel_config=Layout(**best.layout), **best.settings)  # type: ignore[arg-type]  # settings of options


def _stored(options: Options) -> Plan | None:
    plan = read_plan(options.output_dir / FILE)
    return plan if plan and plan.conditions == conditions_of(options, world_size()) else None


def _plan(options: Options, shards: Path) -> Plan:
    cluster = _cluster(options)

    def choose() -> Plan:
        assert cluster is not None  # this runs on rank 0
        run = RunRecord.of(options)
        plan = ask_plan(PlanArguments(run=run, cluster=cluster, shards=encode_path(shards)))
        # Computed here: the planning process has lists where these options have tuples.
        plan = msgspec.structs.replace(plan, conditions=conditions_of(options, world_size()))
        write_plan(options.output_dir / FILE, plan)
        if plan.constants is not None and not plan.constants.known:
            logger.warning("warning: constants of the plan are %s", plan.constants)
        return plan

    return run_on_rank_zero(choose)


def _cluster(options: Options) -> Cluster | None:
    """Read the cluster file, or measure these machines; only rank 0 gets a measured cluster."""
    if options.cluster is None:
        return measured_cluster(pick_device(options.device))
    cluster = read_cluster(options.cluster)
    if cluster.devices != world_size():
        raise ConfigError(
            f"{options.cluster} describes {cluster.devices} devices but {world_size()} processes"
            f" are running; start {cluster.devices}, or drop cluster to measure these machines"
        )
    return cluster


def measured_cluster(device: torch.device) -> Cluster | None:
    """Measure these machines with ms-profile. Collective; only rank 0 gets the cluster.

    Raises:
        ConfigError: ms-profile is not installed.
        LaunchError: the machines cannot be measured.
    """
    try:
        from ms_profile import ProfileError, measure_cluster
    except ImportError as error:
        raise ConfigError(
            'parallel_config = "auto" measures these machines with ms-profile; pip install'
            " 'ms-parallel[profile]', or set cluster to a cluster file"
        ) from error
    try:
        text = measure_cluster(device)
    except ProfileError as error:
        raise LaunchError(str(error)) from error
    return None if text is None else parse_cluster(text, where="measured cluster")
