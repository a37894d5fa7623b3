"""`ms-parallel doctor`: find misconfigurations that break or slow down training on a cluster."""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ms_parallel.command_line import add_json, print_json
from ms_parallel.entry import DONE, FAILED, file_argument, folder_argument, path_argument

if TYPE_CHECKING:
    from ms_parallel.cluster.doctor.examine import DoctorReport
    from ms_parallel.cluster.doctor.recording.recording import Examined

HELP = "find misconfigurations that break or slow down training, with remedies"
EXAMPLE = "torchrun --nproc-per-node 8 -m ms_parallel doctor --output-dir runs/ --html doctor.html"
TIMEOUT_S = 120.0


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--output-dir",
        type=folder_argument,
        metavar="DIR",
        help="output folder of a run: check that all ranks share it, and its write speed",
    )
    parser.add_argument(
        "--device", metavar="NAME", help="cpu or an accelerator (default: the best one)"
    )
    parser.add_argument(
        "--record", type=folder_argument, metavar="FOLDER", help="save everything that is examined"
    )
    parser.add_argument(
        "--from",
        dest="recording",
        type=path_argument,
        metavar="FOLDER",
        help="judge a recording of --record from other machines",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure matmul, memory and link speeds, and write a cluster file of these machines",
    )
    parser.add_argument(
        "--out", type=file_argument, metavar="CLUSTER.toml", help="cluster file for --measure"
    )
    parser.add_argument("--html", type=file_argument, metavar="FILE", help="write an HTML report")
    add_json(parser)


def run(options: Namespace) -> int:
    """Print the findings; return 1 if a check fails."""
    from ms_parallel.errors import ConfigError

    if options.measure != (options.out is not None):
        raise ConfigError("--measure needs --out: doctor --measure --out CLUSTER.toml")
    if options.recording is not None:
        return _judge_recording(options)
    return _examine(options)


def _judge_recording(options: Namespace) -> int:
    from ms_parallel.cluster.doctor.examine import judge
    from ms_parallel.cluster.doctor.recording.folder import read_recording
    from ms_parallel.errors import ConfigError

    for name in ("record", "output_dir", "device", "out"):
        if getattr(options, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} examines this machine and --from a recording; use only one")
    return _report(options, judge(read_recording(options.recording)))


def _examine(options: Namespace) -> int:
    """Examine this machine, or all machines of the launched processes."""
    from ms_parallel.cluster.doctor.examine import examine, judge, measure_links, rendezvous_failure
    from ms_parallel.cluster.doctor.recording.capture import capture
    from ms_parallel.cluster.doctor.recording.recording import Examined
    from ms_parallel.cluster.process import world_size
    from ms_parallel.errors import LaunchError

    try:
        device = _join(options.device)
    except LaunchError as error:
        local = capture(with_machine=True)
        return _report(
            options, judge(Examined(ranks=[local]), [rendezvous_failure(local, str(error))])
        )
    examined, code = examine(options.output_dir), DONE
    if world_size() > 1:
        examined = measure_links(examined, device, lambda report: _report(options, report))
    if examined is not None:
        _write_recording(options, examined)
        code = _report(options, judge(examined))
    if options.measure:
        _measure(device, options)
    return _broadcast_exit_code(code)


def _join(name: str | None) -> Any:
    """Join the process group and return the device for messages."""
    from ms_parallel.cluster.connection import join
    from ms_parallel.cluster.device import pick_device
    from ms_parallel.cluster.layout import Layout
    from ms_parallel.cluster.process import world_size
    from ms_parallel.cluster.slurm import adopt_scheduler

    adopt_scheduler()
    world = world_size()
    # Longer than the doctor's own timeouts, so that it reports before the library gives up.
    join(Layout(data=world), device=name, timeout_s=TIMEOUT_S + 2 * world)
    return pick_device(name)


def _broadcast_exit_code(code: int) -> int:
    """Return rank 0's exit code on all ranks."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return code
    tensor = torch.tensor([code])
    dist.broadcast(tensor, src=0)
    return int(tensor)


def _measure(device: Any, options: Namespace) -> None:
    """Measure the machines of the process group and write their cluster file."""
    from ms_parallel.planner.cluster import write_cluster
    from ms_parallel.planner.measuring.machines import measure_cluster, title

    cluster = measure_cluster(device)
    if cluster is not None:
        write_cluster(options.out, cluster, title=title())
        if not options.json:
            print(f"measured     {options.out}")


def _write_recording(options: Namespace, examined: "Examined") -> None:
    from ms_parallel.cluster.doctor.recording.folder import write_recording

    if options.record is not None:
        write_recording(Path(options.record), examined)


def _report(options: Namespace, report: "DoctorReport") -> int:
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
