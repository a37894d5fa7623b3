"""Tuning tables: the size from which a backend is faster on a chip, and its launch parameters.

A table is a file, ``tables/CHIP.json``, keyed by operator, backend, implementation version and
dtype. ``ms-kernels bench --tune`` generates it on the chip; it is then reviewed and committed.
Nothing is timed in a run: a lookup is a pure function of the call, so all ranks on the same kind of
chip make the same choice. Without a table, or for another version of the implementation, the
defaults in `Implementation.pays_from` and `TunedKernel.defaults` apply. Entries that were not timed
on their chip have ``"measured": false``.
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
"""Maximum size of a table file."""

_NAME = re.compile(r"[a-z][a-z0-9_.-]{0,63}")


Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""Tensor size, within a signed 64-bit integer."""

Value = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""Launch parameter of a kernel."""


class Configuration(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """Launch parameters of one kernel, up to given sizes."""

    kernel: str = ""
    """Name of the kernel within the implementation."""
    at_most: dict[str, Size]
    """Largest size per symbol for which it applies; missing symbols are unlimited."""
    values: dict[str, Value]
    """Launch parameters, such as block sizes and warps."""

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("a configuration needs values")


class TableEntry(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """Tuning results of one implementation in one dtype."""

    operator: str
    backend: str
    version: int
    """Version of the implementation."""
    dtype: str
    """Dtype of the first argument, such as ``"bfloat16"``."""
    pays_from: int | None = 0
    """Total elements of all arguments from which it is faster than the next implementation. None:
    not faster at any size measured."""
    measured: bool = True
    """Whether it was timed on the chip, rather than chosen from the compiled kernels' resources."""
    configurations: tuple[Configuration, ...] = ()
    """Configurations in order; for each kernel the first one that applies is used."""

    def __post_init__(self) -> None:
        if self.version < 1 or (self.pays_from is not None and self.pays_from < 0):
            raise ValueError("version must be 1 or more, and pays_from 0 or more, or null")
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ValueError(f"{self.dtype!r} is not a torch dtype")

    @property
    def key(self) -> tuple[str, str, str]:
        """Unique key within a table."""
        return self.operator, self.backend, self.dtype


class Table(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="format",
    tag="ms-kernels-tuning-1",
):
    """Tuning table of one chip."""

    chip: str
    torch: str
    """Version of torch used for measuring; empty if nothing was measured."""
    entries: tuple[TableEntry, ...]

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.chip):
            raise ValueError(f"{self.chip!r} is not a valid chip name")
        seen = set()
        for entry in self.entries:
            if entry.key in seen:
                raise ValueError(f"two entries for {' '.join(entry.key)}")
            seen.add(entry.key)


def read_table(path: Path) -> Table:
    """Read a table from a file.

    Raises:
        TableError: if the file is not a valid table: unknown or missing fields, values out of
            range, duplicate entries, too large, or a file name that differs from its chip.
    """
    content = read_bytes(path, error=TableError, limit_bytes=LIMIT_BYTES)
    try:
        table = decode_json(content, Table, where=path, error=TableError)
    except TableError as error:
        remedy = "regenerate it with `ms-kernels bench --tune`"
        raise TableError(f"{error}: not a tuning table; {remedy}") from error
    if table.chip != path.stem:
        raise TableError(f"{path} is the table of {table.chip}; rename it to {table.chip}.json")
    return table


def write_table(table: Table, path: Path) -> None:
    """Write a table atomically, one entry per line so that diffs are easy to review.

    Raises:
        TableError: if it cannot be written.
    """
    entries = sorted(table.entries, key=lambda entry: entry.key)
    ordered = msgspec.structs.replace(table, entries=tuple(entries))
    text = msgspec.json.encode(ordered).decode()
    text = text.replace('"entries":[', '"entries":[\n').replace(',{"operator"', ',\n{"operator"')
    partial = path.with_suffix(".json.new")
    with decoding(path, error=TableError):
        partial.unlink(missing_ok=True)
        # "x": never follow a symlink planted under the predictable name.
        with partial.open("x") as file:
            file.write(text + "\n")
        partial.replace(path)


def chips() -> tuple[str, ...]:
    """Return the names of the chips that have a table."""
    return tuple(sorted(path.stem for path in _folder().glob("*.json")))


def _folder() -> Path:
    return Path(str(resources.files("ms_kernels"))) / "tables"


@cache
def _entries(chip: str) -> Mapping[tuple[str, str, str], TableEntry]:
    """Return a chip's entries by key; empty without a table."""
    path = _folder() / f"{chip}.json"
    if not _NAME.fullmatch(chip) or not path.exists():
        return {}
    return {entry.key: entry for entry in read_table(path).entries}


@known_when_traced
def entry_for(
    chip: str, operator: str, backend: str, version: int, dtype: str
) -> TableEntry | None:
    """Return the table entry of an implementation, or None.

    Entries for another version are ignored.
    """
    entry = _entries(chip).get((operator, backend, dtype))
    return entry if entry is not None and entry.version == version else None
