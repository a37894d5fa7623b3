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
HELP = "choose the layout of a run for a cluster: the fastest that fits, and why not the others"
EXAMPLE = "ms-parallel plan RUN.toml --cluster CLUSTER.toml --out PLANNED.toml"


def add_arguments(parser: ArgumentParser) -> None:
    """Declare what the command takes."""
    add_run_file(parser)
    parser.set_defaults(has_run_file=True)
    parser.add_argument(
        "--cluster",
        type=path_argument,
        required=True,
        metavar="CLUSTER.toml",
        help="devices, their memory and rates, and the links between them",
    )
    parser.add_argument(
        "--objective",
        choices=OBJECTIVES,
        default="fastest",
        help="what is best: the fastest step, the fewest device hours, the least memory of a"
        " device, or the most layers",
    )
    parser.add_argument(
        "--best", type=int, default=5, metavar="N", help="layouts to find (default 5)"
    )
    parser.add_argument(
        "--out",
        type=file_argument,
        metavar="PLANNED.toml",
        help="write a run file with the best layout; the plan goes into its output_dir",
    )
    add_json(parser)


def run(options: Namespace) -> int:
    """Plan, print what was found, and write the run file if asked."""
    from pathlib import Path

    from ms_parallel.run_file import read_run_file, write_planned

    run = read_run_file(options.run_file, options.set)  # before torch is imported
    from ms_parallel.planner.cluster import read_cluster
    from ms_parallel.planner.record.plan_file import FILE, write_plan
    from ms_parallel.training.planning.plan import plan

    cluster = read_cluster(options.cluster)
    candidates = (Path(run.dataset), run.options.output_dir / "shards")
    shards = next((folder for folder in candidates if (folder / "index.json").is_file()), None)
    found = plan(
        run.options, cluster, objective=options.objective, best=options.best, shards=shards
    )
    if options.out is not None:
        write_planned(options.run_file, options.set, options.out, found)
        write_plan(run.options.output_dir / FILE, found)
    if options.json:
        return print_json(found)
    _print(found)
    if options.out is not None:
        devices = found.best[0].devices
        print(f"\nwrote {options.out} for {devices} processes, and {run.options.output_dir / FILE}")
    return 0


def _print(plan: "Plan") -> None:
    layers = plan.num_hidden_layers
    depth = "" if layers is None else f", with {layers:,} layers, as many as fit"
    print(f"model      {plan.parameters:,} parameters{depth}")
    print(
        f"devices    {plan.devices:,}, of {plan.limit_bytes / GIB:.3g} GiB that may be taken each"
    )
    print(f"objective  {plan.objective}; times from {plan.times}")
    if plan.constants is not None:
        print(f"constants  {plan.constants}")
    if plan.kept:
        kept = ", ".join(f"{name}={value}" for name, value in plan.kept.items())
        print(f"kept       {kept}, as the run file gives it")
    if plan.errors:
        shown = ", ".join(f"{100 * error:+.0f}%" for error in plan.errors[-5:])
        print(
            f"before     plans were wrong by {shown}; times are multiplied by {plan.correction:.3g}"
        )
    for number, each in enumerate(plan.best, 1):
        _print_layout(number, each)
    print("\nwhy the others fall out")
    for out in plan.fallen:
        print(f"  {out.count:>7,}  {out.reason}; such as {_shortened(out.example)}")


def _print_layout(number: int, each: "PlannedLayout") -> None:
    step = each.step
    layout = ",".join(f"{axis}={size}" for axis, size in each.layout.items())
    settings = ", ".join(f"{name}={value}" for name, value in each.settings.items())
    print(f"\n{number}. {layout}  ({settings})")
    print(
        f"   step {_seconds(step.total)}: compute {_seconds(step.compute)}, bubble"
        f" {_seconds(step.bubble)}, data {_seconds(step.data)}, optimizer"
        f" {_seconds(step.optimizer)}; {each.tokens_per_s:,.0f} tokens/s"
    )
    if each.price_per_hour is not None:
        tokens = 1e9 / each.tokens_per_s / 3600 * each.price_per_hour
        print(
            f"   {each.devices:,} devices at {each.price_per_hour:,.2f} an hour: {tokens:,.2f} for"
            " 10⁹ tokens"
        )
    most = max(each.memory, key=lambda rank: rank.total)
    parts = ", ".join(f"{name} {getattr(most, name) / GIB:.3f}" for name in CATEGORIES)
    where = f" on pipeline rank {most.pipeline}" if len(each.memory) > 1 else ""
    print(f"   memory {most.total / GIB:.3f} GiB at most{where}: {parts}")


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def _shortened(text: str, most: int = 160) -> str:
    return text if len(text) <= most else f"{text[:most]}..."
