"""`ms-parallel doctor`: find what keeps a machine or a cluster from training, or from its speed."""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ms_parallel.command_line import add_json, print_json
from ms_parallel.entry import DONE, FAILED, file_argument, folder_argument, path_argument

if TYPE_CHECKING:
    from ms_parallel.cluster.doctor.examine import DoctorReport
    from ms_parallel.cluster.doctor.recording.recording import Examined

HELP = "find what keeps machines from training, or from training fast, with the remedy"
EXAMPLE = "torchrun --nproc-per-node 8 -m ms_parallel doctor --output-dir runs/ --html doctor.html"
TIMEOUT_S = 120.0


def add_arguments(parser: ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument(
        "--output-dir",
        type=folder_argument,
        metavar="DIR",
        help="folder of a run: see whether all ranks share it, and how fast it is written",
    )
    parser.add_argument("--device", metavar="NAME", help="cpu, or an accelerator; default the best")
    parser.add_argument(
        "--record", type=folder_argument, metavar="FOLDER", help="write what is examined"
    )
    parser.add_argument(
        "--from",
        dest="recording",
        type=path_argument,
        metavar="FOLDER",
        help="judge what --record wrote elsewhere",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="time products, memory and links, and write the cluster file of these machines",
    )
    parser.add_argument(
        "--out", type=file_argument, metavar="CLUSTER.toml", help="where --measure writes it"
    )
    parser.add_argument("--html", type=file_argument, metavar="FILE", help="write a page")
    add_json(parser)


def run(options: Namespace) -> int:
    """Print what is found; 1 where anything fails."""
    from ms_parallel.errors import ConfigError

    if options.measure != (options.out is not None):
        raise ConfigError("--measure and --out go together: doctor --measure --out CLUSTER.toml")
    if options.recording is not None:
        return _read(options)
    return _look(options)


def _read(options: Namespace) -> int:
    from ms_parallel.cluster.doctor.examine import judge
    from ms_parallel.cluster.doctor.recording.folder import read_recording
    from ms_parallel.errors import ConfigError

    for name in ("record", "output_dir", "device", "out"):
        if getattr(options, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} is of this machine and --from of another; leave one out")
    return _say(options, judge(read_recording(options.recording)))


def _look(options: Namespace) -> int:
    """Examine this machine, or all whose processes were started."""
    from ms_parallel.cluster.doctor.examine import examine, judge, not_met, with_links
    from ms_parallel.cluster.doctor.recording.capture import capture
    from ms_parallel.cluster.doctor.recording.recording import Examined
    from ms_parallel.cluster.process import world_size
    from ms_parallel.errors import LaunchError

    try:
        device = _join(options.device)
    except LaunchError as error:
        own = capture(whole=True)
        return _say(options, judge(Examined(ranks=[own]), [not_met(own, str(error))]))
    examined, code = examine(options.output_dir), DONE
    if world_size() > 1:
        examined = with_links(examined, device, lambda report: _say(options, report))
    if examined is not None:
        _write(options, examined)
        code = _say(options, judge(examined))
    if options.measure:
        _measure(device, options)
    return _of_first(code)


def _join(name: str | None) -> Any:
    """Join the other processes, and return the device that messages lie on."""
    from ms_parallel.cluster.connection import join
    from ms_parallel.cluster.device import pick_device
    from ms_parallel.cluster.layout import Layout
    from ms_parallel.cluster.process import world_size
    from ms_parallel.cluster.slurm import adopt_scheduler

    adopt_scheduler()
    world = world_size()
    # Later than the doctor's own patience, so that what is known is said before a library gives up.
    join(Layout(data=world), device=name, timeout_s=TIMEOUT_S + 2 * world)
    return pick_device(name)


def _of_first(code: int) -> int:
    """Return the code of rank 0, on all ranks."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return code
    shared = torch.tensor([code])
    dist.broadcast(shared, src=0)
    return int(shared)


def _measure(device: Any, options: Namespace) -> None:
    """Write the cluster file of all that have met."""
    from ms_parallel.planner.cluster import write_cluster
    from ms_parallel.planner.measuring.machines import measure_cluster, title

    cluster = measure_cluster(device)
    if cluster is not None:
        write_cluster(options.out, cluster, title=title())
        if not options.json:
            print(f"measured     {options.out}")


def _write(options: Namespace, examined: "Examined") -> None:
    from ms_parallel.cluster.doctor.recording.folder import write_recording

    if options.record is not None:
        write_recording(Path(options.record), examined)


def _say(options: Namespace, report: "DoctorReport") -> int:
    from ms_parallel.cluster.doctor.page import draw_page
    from ms_parallel.cluster.doctor.text import report_text
    from ms_parallel.files.durable import write_file

    if options.html is not None:
        write_file(options.html, draw_page(report).encode())
    if options.json:
        print_json(report)
    else:
        print(report_text(report))
    return DONE if report.sound else FAILED
