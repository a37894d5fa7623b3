"""`ms-compress evaluate`: one table, and one page."""

import sys
from pathlib import Path
from typing import Any

import msgspec

from ms_compress.commands.command import Command
from ms_compress.durable import publish, write_synced, writing
from ms_compress.errors import ConfigError
from ms_compress.evaluate import Evaluation, evaluate
from ms_compress.report import table, write_report
from ms_compress.run_file import build

__all__ = ["EVALUATE"]


def run(settings: dict[str, Any], where: str) -> int:
    """Measure what the file names; write `report.json`, `report.txt` and `report.html`."""
    settings = dict(settings)
    out = settings.pop("out", None)
    if not isinstance(out, str):
        raise ConfigError(f"{where}: out is {out!r}; give a folder for the report")
    report = evaluate(build(Evaluation, settings, where=where))
    folder = Path(out)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    text = table(report)
    _write(folder / "report.json", msgspec.json.format(msgspec.json.encode(report)))
    _write(folder / "report.txt", text.encode())
    write_report(report, folder / "report.html")
    sys.stdout.write(text)
    return 0


def _write(path: Path, content: bytes) -> None:
    aside = path.with_name(path.name + ".partial")
    with writing(path):
        aside.unlink(missing_ok=True)
        write_synced(aside, content)
        publish(aside, path)


EVALUATE = Command(
    name="evaluate",
    help="measure exported folders in their runtimes; write a table and a page with plots",
    example="ms-compress evaluate RUN.toml --set out=report",
    run=run,
)
