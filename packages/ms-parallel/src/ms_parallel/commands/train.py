"""`ms-parallel train`: run the training described by a run file."""

import contextlib
import signal
import sys
from argparse import ArgumentParser, Namespace

from ms_parallel.command_line import add_json, print_json
from ms_parallel.entry import INTERRUPTED
from ms_parallel.interruption import end_with_launcher, mark_finished
from ms_parallel.settings.run_file import add_run_file

HELP = "train from a run file; the same command resumes"
EXAMPLE = (
    "torchrun --standalone --nproc-per-node 2 -m ms_parallel train RUN.toml"
    " layout.tensor=2 steps=500"
)


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    add_run_file(parser)
    parser.set_defaults(has_run_file=True)
    add_json(parser)


def run(options: Namespace) -> int:
    """Train or resume, and print the result."""
    end_with_launcher()
    from ms_parallel.run_file import read_run_file

    # Before torch is imported.
    run = read_run_file(options.run_file, options.set, needs_data=True)
    from ms_parallel.cluster.process import is_first
    from ms_parallel.training.trainer import DistributedTrainer

    trainer = DistributedTrainer.from_options(run.options)
    # With --json, stdout is for the result alone.
    stdout = sys.stderr if options.json else sys.stdout
    with contextlib.redirect_stdout(stdout):
        result = trainer.train(run.dataset, run.length.epochs, run.length.steps)
    if options.json and is_first():
        print_json(result)
    if result.finished:
        mark_finished()
    return INTERRUPTED if result.stopped_by == signal.SIGINT.name else 0
