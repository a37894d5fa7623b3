"""`ms-profile doctor`: find misconfigurations that break or slow down training on a cluster."""

import argparse
import importlib.util
from typing import TYPE_CHECKING, Final

import msgspec

from ms_profile.commands.printable import plain
from ms_profile.entry import DONE, FAILED, file_argument, folder_argument, path_argument
from ms_profile.errors import DoctorError, LaunchError
from ms_profile.log.manifest import write_atomically

if TYPE_CHECKING:
    from ms_profile.doctor.checks import DoctorFinding
    from ms_profile.doctor.recording import Examined

HELP: Final = "find misconfigurations that break or slow down training, with remedies"
EXAMPLE: Final = (
    "ms-profile doctor\n"
    "example: torchrun --nproc-per-node 8 -m ms_profile doctor --output-dir runs/"
    " --html doctor.html"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to the parser."""
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
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def execute(options: argparse.Namespace) -> int:
    """Print the findings; return 1 if a check fails."""
    if options.measure != (options.out is not None):
        raise DoctorError("--measure needs --out: doctor --measure --out CLUSTER.toml")
    if options.recording is not None:
        return _judge_recording(options)
    if importlib.util.find_spec("torch") is None:
        raise DoctorError(
            "doctor needs torch to examine machines; pip install"
            " 'ms-profile[torch]', or judge a recording with --from FOLDER"
        )
    return _examine(options)


def _judge_recording(options: argparse.Namespace) -> int:
    from ms_profile.doctor.recording_folder import read_recording

    for name in ("record", "output_dir", "device", "out"):
        if getattr(options, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise DoctorError(f"{flag} examines this machine and --from a recording; use only one")
    return _report(options, read_recording(options.recording))


def _examine(options: argparse.Namespace) -> int:
    """Examine this machine, or all machines of the launched processes."""
    import torch.distributed as dist

    from ms_profile.doctor.capture import capture
    from ms_profile.doctor.cluster import broadcast, measure_cluster
    from ms_profile.doctor.examine import connect, examine, not_connected
    from ms_profile.doctor.recording import Examined
    from ms_profile.doctor.recording_folder import write_recording

    try:
        device = connect(options.device)
    except LaunchError as error:
        recording = capture(with_machine=True)
        return _report(options, Examined(ranks=(recording,)), not_connected(recording, str(error)))
    try:
        examined = examine(
            device, options.output_dir, lambda examined, lost: _report(options, examined, lost)
        )
        code = DONE
        if examined is not None:
            if options.record is not None:
                write_recording(options.record, examined)
            code = _report(options, examined)
        cluster = measure_cluster(device) if options.measure else None
        if cluster is not None:
            write_atomically(options.out, cluster.encode())
            if not options.json:
                print(f"measured     {options.out}")
        return broadcast(code) if dist.is_initialized() else code
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _report(options: argparse.Namespace, examined: "Examined", *findings: "DoctorFinding") -> int:
    """Run the checks and print the report; return 1 if a check fails."""
    from ms_profile.doctor.report import draw_page, judge, report_text

    report = judge(examined, findings)
    if options.html is not None:
        write_atomically(options.html, draw_page(report).encode())
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        for line in report_text(report).splitlines():
            print(plain(line))
    return DONE if report.sound else FAILED
