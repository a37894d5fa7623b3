"""`ms-compress evaluate`: measure folders; write one table and one page."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile

import msgspec

from ms_compress.commands.command import Outcome
from ms_compress.commands.options import EvaluateRun
from ms_compress.errors import ConfigError
from ms_compress.evaluation.measure import evaluate
from ms_compress.files.durable import write_files, writing
from ms_compress.jobs.progress import ProgressDisplay
from ms_compress.report import render, table

FILES = ("report.json", "report.txt", "report.html")


def run(options: EvaluateRun) -> Outcome:
    """Measure what the file names; write `report.json`, `report.txt` and `report.html`."""
    with _place(options.output_dir) as (facts, plain, page):
        with ProgressDisplay("row", tokens=options.sequence_length) as display:
            report = evaluate(options, progress=display.update)
        text = table(report)
        document = msgspec.json.format(msgspec.json.encode(report))
        write_files({facts: document, plain: text.encode(), page: render(report).encode()})
    return Outcome(lines=tuple(text.splitlines()), facts=msgspec.to_builtins(report))


@contextmanager
def _place(folder: Path) -> Iterator[list[Path]]:
    """Give the files to write, in a folder made for them; it is removed again if the work fails."""
    paths = [folder / name for name in FILES]
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=folder).close()
        for path in paths:
            if path.is_dir():
                raise ConfigError(f"{path} is a folder; remove it, or choose another output_dir")
        yield paths
    except BaseException:
        for each in made:
            with suppress(OSError):
                each.rmdir()
        raise
