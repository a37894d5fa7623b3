"""Comparison of a run with the finished or interrupted one in its output folder."""

from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from ms_data.corpus.corpus import Corpus
from ms_data.errors import OutputError, printable

_NAMES = {"chat": "the chat template or its settings", "tokenizer": "the tokenizer's checksum"}
"""Descriptions of settings for messages, where the name is not clear enough."""


class FinishedRun(Protocol):
    """Record of a finished run."""

    @property
    def recipe(self) -> Mapping[str, Any]:
        """Everything that determined the output, apart from the corpus."""
        ...

    @property
    def listing(self) -> str:
        """Checksum of the names and sizes of the corpus files."""
        ...

    @property
    def content(self) -> str:
        """Checksum of the content of the corpus files."""
        ...


def differences(
    saved: Mapping[str, Any], current: Mapping[str, Any], *, ignored: Container[str] = ()
) -> list[str]:
    """Describe the settings that differ between two recipes, with both values."""
    return [
        f"{_NAMES.get(name, name)} is {_text(current.get(name))}, was {_text(saved.get(name))}"
        for name in {**saved, **current}
        if name not in ignored and saved.get(name) != current.get(name)
    ]


def changes_since(
    path: Path,
    record: FinishedRun,
    recipe: Mapping[str, Any],
    source: Corpus,
    *,
    ignored: Container[str] = (),
) -> list[str]:
    """Describe how settings and corpus differ from those of the finished run.

    Args:
        path: file of the record.
        record: the record.
        recipe: settings of the current run.
        source: corpus of the current run.
        ignored: settings that may differ.
    """
    changes = differences(record.recipe, recipe, ignored=ignored)
    if record.listing != source.listing_digest:
        changes.append("the corpus has different files or content")
    # Only hash the corpus again if a file is newer than the record.
    changed = source.changed_since(path.stat().st_mtime_ns)
    if changed and not changes and source.content_digest() != record.content:
        changes.append(f"the corpus content changed, possibly in {printable(changed)}")
    return changes


def check_sizes(folder: Path, sizes: Iterable[tuple[str, int]], *, remedy: str) -> None:
    """Check that the files of a finished run have their recorded sizes.

    Raises:
        OutputError: a file is missing or has another size.
    """
    for name, size_bytes in sizes:
        path = folder / name
        size = path.stat().st_size if path.exists() else 0
        if size != size_bytes:
            raise OutputError(
                f"{printable(path)}: damaged: has {size} bytes, but {size_bytes} were written; "
                f"{remedy}"
            )


def _text(value: object) -> str:
    return "not set" if value is None else printable(repr(value))
