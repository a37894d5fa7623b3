"""`ms-parallel plan`: choose the layout of a run for a cluster."""

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from ms_parallel.command_line import GIB, add_json, print_json
from ms_parallel.entry import file_argument, path_argument
from ms_parallel.settings.run_file import add_run_file

if TYPE_CHECKING:
    from ms_parallel.planner.record.plan_file import Plan, PlannedLayout

OBJECTIVES = ("fastest", "cheapest", "least-memory", "largest-model")
CATEGORIES = ("weights", "gradients", "moments", "activations", "buffers")
HELP = "choose the fastest layout that fits for a run on a cluster, and explain the others"
EXAMPLE = "ms-parallel plan RUN.toml --cluster CLUSTER.toml --out PLANNED.toml"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    add_run_file(parser)
    parser.set_defaults(has_run_file=True)
    parser.add_argument(
        "--cluster",
        type=path_argument,
        required=True,
        metavar="CLUSTER.toml",
        help="cluster file: devices, their memory and speed, and the links between them",
    )
    parser.add_argument(
        "--objective",
        choices=OBJECTIVES,
        default="fastest",
        help="what to optimize: the step time, the device hours, the memory per device, or the"
        " number of layers",
    )
    parser.add_argument(
        "--best", type=int, default=5, metavar="N", help="number of layouts to list (default 5)"
    )
    parser.add_argument(
        "--out",
        type=file_argument,
        metavar="PLANNED.toml",
        help="write a run file with the best layout; the plan goes into its output_dir",
    )
    add_json(parser)


def run(options: Namespace) -> int:
    """Plan a run, print the layouts, and write the planned run file if requested."""
    from pathlib import Path

    from ms_parallel.run_file import read_run_file, write_planned

    run = read_run_file(options.run_file, options.set)  # before torch is imported
    from ms_parallel.planner.cluster import read_cluster
    from ms_parallel.planner.record.plan_file import FILE, write_plan
    from ms_parallel.training.planning.plan import plan

    cluster = read_cluster(options.cluster)
    # The dataset itself, or shards that an earlier launch has built from it.
    out = run.options.output_dir
    candidates = (Path(run.dataset), out / "shards", out / "dataset")
    shards = next((folder for folder in candidates if (folder / "index.json").is_file()), None)
    result = plan(
        run.options, cluster, objective=options.objective, best=options.best, shards=shards
    )
    if options.out is not None:
        write_planned(options.run_file, options.set, options.out, result)
        write_plan(run.options.output_dir / FILE, result)
    if options.json:
        return print_json(result)
    _print(result)
    if options.out is not None:
        devices = result.best[0].devices
        print(f"\nwrote {options.out} for {devices} processes, and {run.options.output_dir / FILE}")
    return 0


def _print(plan: "Plan") -> None:
    layers = plan.num_hidden_layers
    depth = "" if layers is None else f", with {layers:,} layers, the most that fit"
    print(f"model      {plan.parameters:,} parameters{depth}")
    print(f"devices    {plan.devices:,}, with {plan.limit_bytes / GIB:.3g} GiB usable each")
    print(f"objective  {plan.objective}; times from {plan.times}")
    if plan.constants is not None:
        print(f"constants  {plan.constants}")
    if plan.kept:
        settings = ", ".join(f"{name}={value}" for name, value in plan.kept.items())
        print(f"fixed      {settings}, as set in the run file")
    if plan.errors:
        errors = ", ".join(f"{100 * error:+.0f}%" for error in plan.errors[-5:])
        print(
            f"history    earlier plans were off by {errors}; times are scaled by"
            f" {plan.correction:.3g}"
        )
    for number, layout in enumerate(plan.best, 1):
        _print_layout(number, layout)
    print("\nexcluded layouts")
    for excluded in plan.fallen:
        print(f"  {excluded.count:>7,}  {excluded.reason}; such as {_truncate(excluded.example)}")


def _print_layout(number: int, planned: "PlannedLayout") -> None:
    step = planned.step
    axes = ",".join(f"{axis}={size}" for axis, size in planned.layout.items())
    settings = ", ".join(f"{name}={value}" for name, value in planned.settings.items())
    print(f"\n{number}. {axes}  ({settings})")
    print(
        f"   step {_seconds(step.total)}: compute {_seconds(step.compute)}, bubble"
        f" {_seconds(step.bubble)}, data {_seconds(step.data)}, optimizer"
        f" {_seconds(step.optimizer)}; {planned.tokens_per_s:,.0f} tokens/s"
    )
    if planned.price_per_hour is not None:
        tokens = 1e9 / planned.tokens_per_s / 3600 * planned.price_per_hour
        print(
            f"   {planned.devices:,} devices at {planned.price_per_hour:,.2f} per hour:"
            f" {tokens:,.2f} per 10⁹ tokens"
        )
    largest = max(planned.memory, key=lambda rank: rank.total)
    parts = ", ".join(f"{name} {getattr(largest, name) / GIB:.3f}" for name in CATEGORIES)
    location = f" on pipeline rank {largest.pipeline}" if len(planned.memory) > 1 else ""
    print(f"   peak memory {largest.total / GIB:.3f} GiB{location}: {parts}")


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def _truncate(text: str, limit: int = 160) -> str:
    return text if len(text) <= limit else f"{text[:limit]}..."
