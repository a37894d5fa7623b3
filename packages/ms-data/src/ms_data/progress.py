"""Progress of a command: a bar on a terminal, plain lines otherwise."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LINE_EVERY_S = 10.0


@contextmanager
def show_progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a callback (bytes done, total bytes) that shows progress while the block runs."""
    if sys.stderr.isatty():
        with _bar(title) as callback:
            yield callback
    else:
        yield _lines(title)


def _lines(title: str) -> Callable[[int, int], None]:
    start_time: float | None = None
    last_shown = time.monotonic()
    start_bytes = 0

    def show(done: int, total: int) -> None:
        nonlocal start_time, last_shown, start_bytes
        current_time = time.monotonic()
        if start_time is None:
            start_time, start_bytes = current_time, done
        # No line until there is a rate to report.
        if current_time - last_shown < LINE_EVERY_S or done == start_bytes:
            return
        last_shown = current_time
        # bytes per second in this process; a resumed run starts above 0
        rate = (done - start_bytes) / (current_time - start_time)
        sys.stderr.write(
            f"{title}: {done / total:.0%} of {total / 1e6:.0f} MB, {rate / 1e6:.1f} MB/s, "
            f"{(total - done) / rate:.0f} s left\n"
        )

    return show


@contextmanager
def _bar(title: str) -> Iterator[Callable[[int, int], None]]:
    # Importing rich takes longer than everything else, and only terminals need it.
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
