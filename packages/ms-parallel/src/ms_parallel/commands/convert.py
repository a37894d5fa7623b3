"""`ms-parallel convert`: checkpoints of torch.distributed.checkpoint in and out."""

import contextlib
import sys
from argparse import Namespace

from ms_parallel.command_line import add_json, print_json
from ms_parallel.entry import CommandParser, folder_argument, path_argument
from ms_parallel.settings.run_file import add_run_file
from ms_parallel.used_settings import UsedIf

HELP = "start a run from a checkpoint of torchtitan or torch's DCP, or write one"
EXAMPLE = "ms-parallel convert RUN.toml --from-dcp outputs/checkpoint/step-1000"
NAMES = ("torchtitan", "huggingface")


def add_arguments(parser: CommandParser) -> None:
    """Add the command's arguments."""
    add_run_file(parser)
    parser.set_defaults(has_run_file=True)
    parser.used_if = (
        UsedIf("step", "with --from-dcp", lambda options: options.from_dcp is not None),
        UsedIf("names", "with --to-dcp", lambda options: options.to_dcp is not None),
    )
    direction = parser.add_mutually_exclusive_group(required=True)
    direction.add_argument(
        "--from-dcp",
        type=path_argument,
        metavar="FOLDER",
        help="checkpoint to start the run from; `train` then resumes from it",
    )
    direction.add_argument(
        "--to-dcp",
        type=folder_argument,
        metavar="FOLDER",
        help="folder to create from the newest checkpoint of the run",
    )
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="steps taken before --from-dcp, if its folder does not record them",
    )
    parser.add_argument(
        "--weights-only",
        action="store_true",
        help="load the weights of --from-dcp alone, and start with a new optimizer state",
    )
    parser.add_argument(
        "--names",
        choices=NAMES,
        default=NAMES[0],
        help="names of the tensors of --to-dcp (default: %(default)s)",
    )
    add_json(parser)


def run(options: Namespace) -> int:
    """Convert a checkpoint and print its step."""
    from ms_parallel.run_file import read_run_file

    run = read_run_file(options.run_file, options.set, needs_data=True)
    from attrs import evolve

    from ms_parallel.cluster.process import is_first, world_size
    from ms_parallel.training.trainer import DistributedTrainer

    # Checkpoints do not depend on the layout, so a single process can convert each.
    settings = run.options
    if world_size() == 1:
        settings = evolve(settings, parallel_config=None, cluster=None)
    trainer = DistributedTrainer.from_options(settings)
    length = (run.length.epochs, run.length.steps)
    with contextlib.redirect_stdout(sys.stderr if options.json else sys.stdout):
        if options.from_dcp is not None:
            folder = run.options.output_dir / "checkpoints"
            step = trainer.import_checkpoint(
                options.from_dcp,
                run.dataset,
                *length,
                step=options.step,
                weights_only=options.weights_only,
            )
        else:
            folder = options.to_dcp
            step = trainer.export_checkpoint(folder, run.dataset, *length, names=options.names)
    if options.json and is_first():
        return print_json({"step": step, "folder": str(folder)})
    if is_first():
        print(f"wrote the checkpoint of step {step} to {folder}")
    return 0
