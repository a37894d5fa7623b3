"""`build`: build the operator library of a chip."""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from rich.console import Console
from rich.progress import Progress as RichProgress

from ms_kernels.aot import build as build_library
from ms_kernels.aot.building import Progress
from ms_kernels.aot.manifest import read_manifest


def build(options: argparse.Namespace) -> int:
    """Build the operator library of a chip."""
    build_options = {"only": options.only, "jobs": options.jobs}
    if options.json:
        folder = build_library(options.target, options.out, **build_options)
    else:
        with _progress() as progress:
            folder = build_library(options.target, options.out, progress=progress, **build_options)
    manifest = read_manifest(folder)
    if options.json:
        facts = {"folder": str(folder), "manifest": msgspec.to_builtins(manifest)}
        print(json.dumps(facts, indent=2))
    else:
        size = sum(file.size_bytes for file in manifest.files) / 2**20
        print(f"{folder}: {len(manifest.kernels)} kernels for {manifest.target}, {size:.1f} MiB")
    return 0


@contextmanager
def _progress() -> Iterator[Progress]:
    """Show a progress bar on a terminal, otherwise print a line per tenth of the work."""
    if not sys.stderr.isatty():
        yield _print_tenths
        return
    with RichProgress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("building")
        yield lambda piece, done, count: bar.update(
            task, description=piece, completed=done, total=count
        )


def _print_tenths(piece: str, done: int, count: int) -> None:
    if done == count or done % max(count // 10, 1) == 0:
        print(f"{done} of {count}: {piece}", file=sys.stderr)
