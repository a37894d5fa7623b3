"""The command: `python -m ms_parallel` and `ms-parallel`, skins over public functions.

Nothing here imports torch before a command needs it.
"""

import contextlib
import os
import shutil
import signal
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ms_parallel import __version__
from ms_parallel.cluster.parent import end_with_launcher
from ms_parallel.entry import INTERRUPTED, CommandParser, perform

__all__ = ["main"]

GIB = 1 << 30


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 0 (done), 1 (failed), 2 (bad input) or 130 (Ctrl-C)."""
    words = sys.argv[1:] if arguments is None else arguments
    options = _parser(words).parse_args(words)
    return perform("ms-parallel", lambda: int(options.run(options)), report=_report)


def _report(error: BaseException) -> int | None:
    """One process speaks for all, where there are several; alone, the frame of a command does."""
    if "WORLD_SIZE" not in os.environ and "ms_parallel.cluster.endings" not in sys.modules:
        return None
    from ms_parallel.cluster.endings import report

    return report(error)


def _parser(words: Sequence[str]) -> CommandParser:
    parser = CommandParser(
        "ms-parallel",
        version=__version__,
        description="Train language models over many processes.",
        example="torchrun --standalone --nproc-per-node 2 -m ms_parallel train RUN.toml",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=CommandParser)
    train = commands.add_parser(
        "train",
        help="train as a run file says; the same command resumes",
        example="torchrun --standalone --nproc-per-node 2 -m ms_parallel train RUN.toml"
        " --set layout.tensor=2 --set steps=500",
    )
    inspect = commands.add_parser(
        "inspect",
        help="say what a run will be: parameters, memory of each rank, layout",
        example="ms-parallel inspect RUN.toml --set layout.pipeline=4",
    )
    init = commands.add_parser(
        "init",
        help="write a run file with every key, its default and its meaning",
        example="ms-parallel init --out RUN.toml",
    )
    init.add_argument("--out", metavar="RUN.toml", help="a new file; otherwise it is printed")
    init.set_defaults(run=_init)
    _add_schedule(commands)
    doctor = commands.add_parser(
        "doctor", help="say what this machine has", example="ms-parallel doctor --json"
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
        if {"-h", "--help"} & set(words):
            from ms_parallel.run_template import keys_text

            command.epilog = f"{keys_text()}\n\n{command.epilog}"
    for command in (train, inspect, doctor):
        command.add_argument("--json", action="store_true", help="print facts as JSON")
    doctor.set_defaults(run=_doctor)
    return parser


def _add_schedule(commands: Any) -> None:
    schedule = commands.add_parser(
        "schedule",
        help="prove a pipeline schedule and draw its timeline",
        example="ms-parallel schedule zb-v --stages 4 --microbatches 8"
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


def _schedule(options: Namespace) -> int:
    from ms_parallel.planner.explain import draw_to, explain
    from ms_parallel.schedules.drawing.legend import path_text
    from ms_parallel.schedules.drawing.text import draw_text

    explained = explain(
        options.schedule,
        ranks=options.stages,
        microbatches=options.microbatches,
        costs=options.costs,
        memory_cap=options.memory_cap,
        measured=options.measured,
    )
    if options.out is not None:
        draw_to(options.out, explained)
    if options.json:
        return _print_json(explained.facts)
    width = shutil.get_terminal_size((100, 24)).columns
    colour = sys.stdout.isatty()
    print(draw_text(*explained.lines, titles=explained.titles, width=width, colour=colour), end="")
    print(f"critical path: {path_text(explained.timeline)}")
    if pairs := explained.facts.overlapped_pairs:
        print(f"{pairs} overlapped pairs are timed, and performed, one after the other")
    if explained.facts.lower_bound is not None:
        print(f"no schedule is shorter than {explained.facts.lower_bound:.4g}")
    return 0


def _train(options: Namespace) -> int:
    end_with_launcher()
    from ms_parallel.cluster.process import is_first
    from ms_parallel.run_file import read_run_file
    from ms_parallel.training.trainer import DistributedTrainer

    run = read_run_file(options.run_file, options.set)
    trainer = DistributedTrainer.from_options(run.options)
    stdout = sys.stderr if options.json else sys.stdout
    with contextlib.redirect_stdout(stdout):
        result = trainer.train(run.dataset_path, run.length.epochs, run.length.steps)
    if options.json and is_first():
        _print_json(result)
    return INTERRUPTED if result.stopped_by == signal.SIGINT.name else 0


def _init(options: Namespace) -> int:
    from ms_parallel.errors import ConfigError
    from ms_parallel.files.durable import write_file
    from ms_parallel.run_template import template

    if options.out is None:
        print(template(), end="")
        return 0
    if os.path.lexists(options.out):
        raise ConfigError(f"{options.out} exists; choose another name, or delete it")
    write_file(Path(options.out), template().encode())
    print(f"wrote {options.out}; fill in dataset, then: ms-parallel train {options.out}")
    return 0


def _inspect(options: Namespace) -> int:
    from ms_parallel.run_file import read_run_file
    from ms_parallel.training.fitting import layout_of
    from ms_parallel.training.inspection import inspect

    run = read_run_file(options.run_file, options.set)
    candidates = (Path(run.dataset_path), run.options.output_dir / "shards")
    shards = next((folder for folder in candidates if (folder / "index.json").is_file()), None)
    facts = inspect(run.options, layout_of(run.options), shards)
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


def _doctor(options: Namespace) -> int:
    from ms_parallel.cluster.doctor import examine

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
    encoded = msgspec.json.encode(facts, enc_hook=str)
    print(msgspec.json.format(encoded, indent=2).decode())
    return 0
