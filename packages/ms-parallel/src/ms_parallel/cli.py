"""The command: `python -m ms_parallel` and `ms-parallel`, skins over public functions."""

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ms_parallel import exits

__all__ = ["main"]

GIB = 1 << 30


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 0 (done), 1 (failed) or 2 (bad input)."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read the output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # whatever is not told in a line keeps its traceback
        code = exits.report(error)
        if code is None:
            raise
        return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ms-parallel",
        description="Train language models over many processes.",
        epilog="example: torchrun --standalone --nproc-per-node 2 -m ms_parallel train RUN.toml",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    train = commands.add_parser(
        "train",
        help="train as a run file says; the same command resumes",
        epilog="example: torchrun --standalone --nproc-per-node 2 -m ms_parallel train RUN.toml"
        " --set parallel_config.tensor=2 --set steps=500",
    )
    inspect = commands.add_parser(
        "inspect",
        help="say what a run will be: parameters, memory of each rank, layout",
        epilog="example: ms-parallel inspect RUN.toml --set parallel_config.pipeline=4",
    )
    _add_schedule(commands)
    doctor = commands.add_parser(
        "doctor", help="say what this machine has", epilog="example: ms-parallel doctor --json"
    )
    for command, function in ((train, _train), (inspect, _inspect)):
        command.add_argument("run_file", metavar="RUN.toml", help="settings of the run, in TOML")
        command.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="change one setting; table.key=value reaches into a table",
        )
        command.set_defaults(run=function)
    for command in (inspect, doctor):
        command.add_argument("--json", action="store_true", help="print facts as JSON")
    doctor.set_defaults(run=_doctor)
    return parser


def _add_schedule(commands: Any) -> None:
    schedule = commands.add_parser(
        "schedule",
        help="prove a pipeline schedule and draw its timeline",
        epilog="example: ms-parallel schedule zb-v --stages 4 --microbatches 8"
        " --costs backward_input=1.3,latency=0.1 --out zb-v.svg",
    )
    schedule.add_argument(
        "schedule",
        metavar="NAME|FILE",
        help="a generator, a table (.csv), `search`, or a recorded step (.json)",
    )
    schedule.add_argument(
        "--stages", type=int, metavar="P", help="ranks of the pipeline (a V gives each two stages)"
    )
    schedule.add_argument("--microbatches", type=int, metavar="M", help="of one step")
    schedule.add_argument(
        "--costs",
        default="",
        metavar="COSTS",
        help="forward, backward_input, backward_weight, activation (each 1) and latency (0),"
        " as forward=1:1:1:1.4,latency=0.1",
    )
    schedule.add_argument("--memory-cap", type=float, metavar="N", help="of a rank, for `search`")
    schedule.add_argument(
        "--measured", metavar="FILE.json", help="a recorded step, drawn beside the simulated one"
    )
    schedule.add_argument("--out", metavar="FILE", help="write .svg, .html or .csv")
    schedule.add_argument("--json", action="store_true", help="print facts as JSON")
    schedule.set_defaults(run=_schedule)


def _schedule(options: argparse.Namespace) -> int:
    from ms_parallel.schedule_facts import draw_to, tell
    from ms_parallel.schedules import draw_text, path_text

    told = tell(
        options.schedule,
        ranks=options.stages,
        microbatches=options.microbatches,
        costs=options.costs,
        memory_cap=options.memory_cap,
        measured=options.measured,
    )
    if options.out is not None:
        draw_to(options.out, told)
    if options.json:
        return _print_json(told.facts)
    width = shutil.get_terminal_size((100, 24)).columns
    colour = sys.stdout.isatty()
    print(draw_text(*told.lines, titles=told.titles, width=width, colour=colour), end="")
    print(f"critical path: {path_text(told.timeline)}")
    if told.facts.lower_bound is not None:
        print(f"no schedule is shorter than {told.facts.lower_bound:.4g}")
    return 0


def _train(options: argparse.Namespace) -> int:
    from ms_parallel.run_file import read_run_file

    run = read_run_file(options.run_file, options.set)
    run.trainer.train(run.dataset_path, epochs=run.epochs, steps=run.steps)
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from ms_parallel.inspection import inspect
    from ms_parallel.run_file import read_run_file

    run = read_run_file(options.run_file, options.set)
    trainer = run.trainer
    candidates = (Path(run.dataset_path), trainer.output_dir / "shards")
    shards = next((folder for folder in candidates if (folder / "index.json").is_file()), None)
    facts = inspect(trainer, trainer.layout, shards)
    if options.json:
        return _print_json(facts)
    print(f"model        {facts.architecture}, {facts.parameters:,} parameters")
    print(f"layout       {facts.layout}: {facts.processes} processes")
    print(
        f"a step       {facts.tokens_per_step:,} tokens, {facts.microbatches} microbatches a"
        " data rank"
    )
    print(f"\n{facts.picture}\n")
    print("memory of a rank, estimated")
    for rank in facts.ranks:
        print(
            f"  pipeline {rank.pipeline}: {rank.layers} layers, {rank.parameters:,} parameters;"
            f" weights, gradients, moments {rank.state_bytes / GIB:.3f} GiB;"
            f" activations {rank.activation_bytes / GIB:.3f} GiB"
        )
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from ms_parallel.doctor import examine

    machine = examine()
    if options.json:
        return _print_json(machine)
    print(f"python       {machine.python} on {machine.system}")
    print(f"processor    {machine.cores} cores, {machine.memory_bytes / GIB:.1f} GiB memory")
    print(f"disk         {machine.free_disk_bytes / GIB:.1f} GiB free here")
    for index, one in enumerate(machine.accelerators):
        print(f"{machine.device}:{index:<8} {one.name}, {one.memory_bytes / GIB:.0f} GiB")
    print(f"a run takes  {machine.device}")
    print(f"backends     {', '.join(machine.backends) or 'none'}")
    print(f"torchrun     {machine.torchrun or 'not found'}")
    for name, version in machine.packages.items():
        print(f"{name:<12} {version or 'not installed'}")
    for problem in machine.problems:
        print(f"problem: {problem}")
    return 0


def _print_json(facts: Any) -> int:
    print(msgspec.json.format(msgspec.json.encode(facts), indent=2).decode())
    return 0
