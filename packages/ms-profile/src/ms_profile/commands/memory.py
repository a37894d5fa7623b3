"""`ms-profile memory`: peak memory by category, module and line, on one offline page."""

import argparse
import sys
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table

from ms_profile.analysis.memory_use import MemoryUse, analyse_memory, read_prediction
from ms_profile.commands.printable import cell, plain
from ms_profile.entry import CommandParser, file_argument, path_argument
from ms_profile.report.page import write_memory_page
from ms_profile.used_settings import UsedIf

HELP: Final = "show peak memory by category, module and line, and fragmentation"
EXAMPLE: Final = "ms-profile memory snapshot.pickle --out memory.html"
MIB: Final = 1 << 20
MAX_LINES: Final = 8


def add_arguments(parser: CommandParser) -> None:
    """Add the command's arguments to the parser."""
    parser.used_if = (
        UsedIf("out title", "without --json", lambda options: not options.json),
        UsedIf("pipeline_rank", "with --predicted", lambda options: options.predicted),
    )
    parser.add_argument(
        "path",
        type=path_argument,
        metavar="SNAPSHOT",
        help="file of torch.cuda.memory._dump_snapshot, or a trace with profile_memory=True",
    )
    parser.add_argument(
        "--out", type=file_argument, metavar="FILE", help="page; default: SNAPSHOT.html"
    )
    parser.add_argument("--title", default="", help="title of the page")
    parser.add_argument("--predicted", type=path_argument, metavar="FILE",
                        help="prediction to compare with: output of `ms-parallel plan --json`, or "
                        "a JSON list from predict_memory")  # fmt: skip
    parser.add_argument(
        "--pipeline-rank",
        type=int,
        metavar="N",
        help="rank of the prediction; default: the rank with the most memory",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the result as JSON and write no page"
    )


def execute(options: argparse.Namespace) -> int:
    """Analyze the snapshot, write the page and print the peak."""
    predicted = None
    if options.predicted is not None:
        predicted = read_prediction(options.predicted, pipeline_rank=options.pipeline_rank)
    devices = analyse_memory(options.path, predicted=predicted)
    if options.json:
        print(msgspec.json.encode({"devices": devices}).decode())
        return 0
    out = options.out
    if out is None:
        out = options.path.with_name(f"{options.path.name}.html")
    title = options.title or f"Memory of {plain(options.path.name)}"
    write_memory_page(devices, out, title=title)
    for device in devices:
        _print_device(device)
    print(f"page: {out}")
    return 0


def _print_device(device: MemoryUse) -> None:
    name = "host" if device.device < 0 else f"device {device.device}"
    peak = max(device.totals.peak, 1)
    table = Table(title=f"{name}: peak {device.totals.peak / MIB:,.1f} MiB at event "
                  f"{device.peak_event} of {device.events}")  # fmt: skip
    columns = ["at the peak", "MiB", "share", "highest MiB"]
    if device.predicted is not None:
        columns += ["predicted MiB"]
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right")
    for category, size in sorted(device.categories.items(), key=lambda item: -item[1]):
        expected = (device.predicted or {}).get(category)
        highest = device.highest[category]
        if highest or expected:
            cells = [f"{size / MIB:,.1f}", f"{size / peak:.1%}", f"{highest / MIB:,.1f}"]
            if device.predicted is not None:
                cells.append("" if expected is None else f"{expected / MIB:,.1f}")
            table.add_row(category, *cells)
    table.add_section()
    for line, size in device.lines[:MAX_LINES]:
        table.add_row(cell(line), f"{size / MIB:,.1f}", f"{size / peak:.1%}")
    Console().print(table)
    for note in device.notes:
        print(f"ms-profile: {plain(note)}", file=sys.stderr)
