"""Tuning tables: from which size a backend pays on a chip, and how kernels run best there.

A table is a file, ``tables/CHIP.json``, keyed by operator, backend, the implementation's version
and dtype. It is made by ``ms-kernels bench --tune`` on the chip, reviewed and committed; nothing is
timed in a run. What it says is a pure function of the call, so every rank on the same kind of chip
decides alike. A chip without a table, or an implementation that changed its version since, gets
what the implementation and its kernels say themselves: `Implementation.pays_from` and
`TunedKernel.defaults`. An entry that nobody timed on its chip says so: ``"measured": false``.
"""

import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated

import msgspec
import torch

from ms_kernels.core.tracing import known_when_traced
from ms_kernels.errors import TableError
from ms_kernels.files.untrusted import decode_json, decoding, read_bytes

LIMIT_BYTES = 2**22
"""Size of the largest table that is read."""

_NAME = re.compile(r"[a-z][a-z0-9_.-]{0,63}")


Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A whole number that any decoder holds."""

Value = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""A kernel's parameter."""


class Configuration(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """What one kernel runs with, up to some sizes."""

    kernel: str = ""
    """Which of the implementation's kernels."""
    at_most: dict[str, Size]
    """Sizes by symbol up to which it holds; one that is not named may be any."""
    values: dict[str, Value]
    """The kernel's parameters, such as block sizes and warps."""

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("a configuration needs values")


class TableEntry(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """What is known of one implementation in one dtype."""

    operator: str
    backend: str
    version: int
    """Version of the implementation."""
    dtype: str
    """Dtype of the first argument, such as ``"bfloat16"``."""
    pays_from: int | None = 0
    """Elements, of all arguments together, from which on it beats what comes after it; None: at
    no size that was tried."""
    measured: bool = True
    """Whether it was timed on the chip; else it was chosen by what the compiled kernels take."""
    configurations: tuple[Configuration, ...] = ()
    """The first that holds is taken, for each kernel."""

    def __post_init__(self) -> None:
        if self.version < 1 or (self.pays_from is not None and self.pays_from < 0):
            raise ValueError("version must be 1 or more, and pays_from 0 or more, or null")
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ValueError(f"there is no dtype {self.dtype!r}")

    @property
    def key(self) -> tuple[str, str, str]:
        """What an entry is found by; a table has one for each."""
        return self.operator, self.backend, self.dtype


class Table(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="format",
    tag="ms-kernels-tuning-1",
):
    """All that was measured on one chip."""

    chip: str
    torch: str
    """Version of torch it was measured with; empty where nothing was."""
    entries: tuple[TableEntry, ...]

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.chip):
            raise ValueError(f"{self.chip!r} is no name of a chip")
        seen = set()
        for entry in self.entries:
            if entry.key in seen:
                raise ValueError(f"two entries for {' '.join(entry.key)}")
            seen.add(entry.key)


def read_table(path: Path) -> Table:
    """Read a table from a file.

    Raises:
        TableError: when the file is no table: unknown or missing fields, values out of range, two
            entries for one implementation, too large, or made for a chip other than its name says.
    """
    content = read_bytes(path, error=TableError, limit_bytes=LIMIT_BYTES)
    try:
        table = decode_json(content, Table, where=path, error=TableError)
    except TableError as error:
        remake = "make it anew with `ms-kernels bench --tune`"
        raise TableError(f"{error}: no tuning table; {remake}") from error
    if table.chip != path.stem:
        raise TableError(f"{path} is a table of {table.chip}; name it {table.chip}.json")
    return table


def write_table(table: Table, path: Path) -> None:
    """Write a table, whole or not at all, in a form that reviews well: one entry a line.

    Raises:
        TableError: when it cannot be written there.
    """
    entries = sorted(table.entries, key=lambda entry: entry.key)
    ordered = msgspec.structs.replace(table, entries=tuple(entries))
    text = msgspec.json.encode(ordered).decode()
    text = text.replace('"entries":[', '"entries":[\n').replace(',{"operator"', ',\n{"operator"')
    aside = path.with_suffix(".json.new")
    with decoding(path, error=TableError):
        aside.write_text(text + "\n")
        aside.replace(path)


def chips() -> tuple[str, ...]:
    """Return the names of the chips that have a table of their own."""
    return tuple(sorted(each.stem for each in _folder().glob("*.json")))


def _folder() -> Path:
    return Path(str(resources.files("ms_kernels"))) / "tables"


@cache
def _entries(chip: str) -> Mapping[tuple[str, str, str], TableEntry]:
    """Return a chip's entries by key; none where there is no table."""
    path = _folder() / f"{chip}.json"
    if not _NAME.fullmatch(chip) or not path.exists():
        return {}
    return {entry.key: entry for entry in read_table(path).entries}


@known_when_traced
def entry_for(
    chip: str, operator: str, backend: str, version: int, dtype: str
) -> TableEntry | None:
    """Return what a chip's table says of an implementation, or None.

    An entry for another version of it counts for nothing.
    """
    entry = _entries(chip).get((operator, backend, dtype))
    return entry if entry is not None and entry.version == version else None
