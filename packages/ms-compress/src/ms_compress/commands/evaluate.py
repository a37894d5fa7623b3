"""`ms-compress evaluate`: one table, and one page."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import msgspec

from ms_compress.commands.command import Command
from ms_compress.commands.progress import Shown
from ms_compress.durable import write_files, writing
from ms_compress.errors import ConfigError
from ms_compress.evaluate import Evaluation, evaluate
from ms_compress.report import render, table
from ms_compress.run_file import build

__all__ = ["EVALUATE"]

FILES = ("report.json", "report.txt", "report.html")


def run(settings: dict[str, Any], where: str) -> int:
    """Measure what the file names; write `report.json`, `report.txt` and `report.html`."""
    settings = dict(settings)
    out = settings.pop("out", None)
    if not isinstance(out, str):
        raise ConfigError(f"{where}: out is {out!r}; give a folder for the report")
    evaluation = build(Evaluation, settings, where=where)
    with _place(Path(out)) as (facts, plain, page):
        with Shown("row", tokens=evaluation.sequence_length) as shown:
            report = evaluate(evaluation, progress=shown.made)
        text = table(report)
        document = msgspec.json.format(msgspec.json.encode(report))
        write_files({facts: document, plain: text.encode(), page: render(report).encode()})
    sys.stdout.write(text)
    return 0


@contextmanager
def _place(folder: Path) -> Iterator[list[Path]]:
    """The files to write in a folder that can be written, which goes again if none comes of it."""
    paths = [folder / name for name in FILES]
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=folder).close()
        for path in paths:
            if path.is_dir():
                raise ConfigError(f"{path} is a folder; remove it, or choose another out")
        yield paths
    except BaseException:
        for each in made:
            with suppress(OSError):
                each.rmdir()
        raise


EVALUATE = Command(
    name="evaluate",
    help="measure exported folders in their runtimes; write a table and a page with plots",
    example="ms-compress evaluate RUN.toml --set out=report",
    run=run,
)
