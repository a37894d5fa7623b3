"""Shows how far a command has come: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ms_data.build import Progress

__all__ = ["showing"]

LINE_EVERY_S = 10.0


@contextmanager
def showing(title: str) -> Iterator[Callable[[Progress], None]]:
    """Gives a callback that shows progress on standard error while the block runs."""
    if sys.stderr.isatty():
        with _bar(title) as callback:
            yield callback
    else:
        yield _lines(title)


def _lines(title: str) -> Callable[[Progress], None]:
    began = shown = time.monotonic()
    first: Progress | None = None

    def show(progress: Progress) -> None:
        nonlocal began, shown, first
        now = time.monotonic()
        if first is None:
            began, first = now, progress
        if now - shown < LINE_EVERY_S:
            return
        shown = now
        rate = (progress.read_bytes - first.read_bytes) / (now - began)
        left = (progress.total_bytes - progress.read_bytes) / rate if rate else 0.0
        sys.stderr.write(
            f"{title}: {progress.read_bytes / max(1, progress.total_bytes):.0%}, "
            f"{progress.tokens:,} tokens, {rate / 1e6:.1f} MB/s, {left:.0f} s left\n"
        )

    return show


@contextmanager
def _bar(title: str) -> Iterator[Callable[[Progress], None]]:
    # Imported here because it takes longer than all the rest, and only terminals need it.
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[tokens]:,} tokens"),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=None, tokens=0)

        def show(progress: Progress) -> None:
            bar.update(
                task,
                total=progress.total_bytes,
                completed=progress.read_bytes,
                tokens=progress.tokens,
            )

        yield show
