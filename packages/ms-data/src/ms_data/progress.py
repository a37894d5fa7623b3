"""Shows how far a command has come: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LINE_EVERY_S = 10.0


@contextmanager
def show_progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """Give a callback (bytes done, bytes in all) that shows progress while the block runs."""
    if sys.stderr.isatty():
        with _bar(title) as callback:
            yield callback
    else:
        yield _lines(title)


def _lines(title: str) -> Callable[[int, int], None]:
    began: float | None = None
    shown = time.monotonic()
    first = 0

    def show(done: int, total: int) -> None:
        nonlocal began, shown, first
        now = time.monotonic()
        if began is None:
            began, first = now, done
        if now - shown < LINE_EVERY_S or done == first:
            return
        shown = now
        rate = (done - first) / (now - began)
        sys.stderr.write(
            f"{title}: {done / total:.0%} of {total / 1e6:.0f} MB, {rate / 1e6:.1f} MB/s, "
            f"{(total - done) / rate:.0f} s left\n"
        )

    return show


@contextmanager
def _bar(title: str) -> Iterator[Callable[[int, int], None]]:
    # Imported here because it takes longer than all the rest, and only terminals need it.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
