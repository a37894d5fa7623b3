"""`ms-compress evaluate`: measure exported folders; write a table and an HTML page."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile

import msgspec

from ms_compress.errors import ConfigError
from ms_compress.evaluation.measure import evaluate
from ms_compress.files.durable import write_files, writing
from ms_compress.options import EvaluateRun
from ms_compress.report import render, table
from ms_compress.run.outcome import Outcome
from ms_compress.run.progress import ProgressDisplay

FILES = ("report.json", "report.txt", "report.html")


def run(options: EvaluateRun) -> Outcome:
    """Measure the folders of the run file; write `report.json`, `report.txt`, `report.html`."""
    with _report_files(options.output_dir) as (json_file, text_file, html_file):
        with ProgressDisplay("row", tokens=options.sequence_length) as display:
            report = evaluate(options, progress=display.update)
        text = table(report)
        document = msgspec.json.format(msgspec.json.encode(report))
        write_files(
            {json_file: document, text_file: text.encode(), html_file: render(report).encode()}
        )
    return Outcome(lines=tuple(text.splitlines()), facts=msgspec.to_builtins(report))


@contextmanager
def _report_files(folder: Path) -> Iterator[list[Path]]:
    """Yield the report paths in a new folder, which is removed again if the block fails."""
    paths = [folder / name for name in FILES]
    created = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    try:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            # Fails now instead of after the measurements if the folder cannot be written.
            TemporaryFile(dir=folder).close()
        for path in paths:
            if path.is_dir():
                raise ConfigError(f"{path} is a folder; remove it or set another output_dir")
        yield paths
    except BaseException:
        for parent in created:
            with suppress(OSError):
                parent.rmdir()
        raise
