"""The record of a finished pass: what went in, what came out, and what became of all documents."""

import os
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from ms_data.corpus.corpus import Corpus
from ms_data.corpus.file_kinds import omissions
from ms_data.disk.format import sealed
from ms_data.errors import OutputError, SettingError, printable
from ms_data.files.durable import write_file
from ms_data.files.untrusted import decode_json, read_bytes
from ms_data.passes.output import FileEntry
from ms_data.passes.tally import ReasonTally, Tally

LEDGER_FILE = "ledger.json"
LIMIT_BYTES = 1 << 26


class LedgerSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What a pass over a corpus kept and dropped."""

    folder: str
    documents: int
    """documents = kept + dropped + quarantined."""
    kept: int
    dropped: dict[str, int]
    """Documents, by the rule and setting that decided."""
    quarantined: int
    """Documents that cannot be read."""
    left_out: dict[str, int]
    """Files of a folder left out because they are no text, by what they are."""
    bytes_in: int
    """The documents as UTF-8."""
    bytes_out: int
    size_bytes: int
    """The documents that were kept, as they lie on disk."""
    empty: int = 0
    """Rows, lines and files that hold no text, which are no documents."""
    done_before: bool = False
    """Whether all of it was there already, so that nothing was done."""

    @classmethod
    def of(
        cls, folder: str, tally: Tally, left_out: dict[str, int], size_bytes: int, empty: int = 0
    ) -> "LedgerSummary":
        """Sum up what became of documents."""
        return cls(
            folder=folder,
            documents=tally.documents,
            kept=tally.kept,
            dropped=_counts(tally.dropped),
            quarantined=tally.quarantined,
            left_out=left_out,
            bytes_in=tally.bytes_in,
            bytes_out=tally.bytes_out,
            size_bytes=size_bytes,
            empty=empty,
        )

    @property
    def omissions(self) -> str:
        """What was left out, as a part of a line; empty where nothing was."""
        return omissions(self.left_out, empty=self.empty)


class PassRecord(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="ms-data.ledger.2"
):
    """What a pass was made from and with which settings, and what it wrote."""

    kind: str
    """The command, such as `clean`."""
    recipe: dict[str, Any]
    """All that decides the bytes, apart from the corpus."""
    listing: str
    """Names and sizes of the files of the corpus, as a checksum."""
    content: str
    """Their bytes, as a checksum."""
    tally: Tally
    left_out: dict[str, int]
    empty: int
    files: tuple[FileEntry, ...]
    checksum: str = ""
    """Hexadecimal xxh3-128 of this record with an empty checksum."""

    def summary(self, folder: str | Path, *, done_before: bool = False) -> LedgerSummary:
        """Sum the record up."""
        documents = [one for one in self.files if one.name.startswith("documents/")]
        size_bytes = sum(one.size_bytes for one in documents)
        summary = LedgerSummary.of(str(folder), self.tally, self.left_out, size_bytes, self.empty)
        return msgspec.structs.replace(summary, done_before=done_before)


def save_record(aside: Path, record: PassRecord) -> None:
    """Write the record of a finished pass.

    Raises:
        OutputError: the disk is full or the place cannot be written.
    """
    write_file(aside / LEDGER_FILE, sealed(record, "checksum"))


def read_record(folder: Path, *, error: type[Exception] = SettingError) -> PassRecord:
    """Read the record of a finished pass, checked.

    Raises:
        error: there is none, or it is damaged.
    """
    path = folder / LEDGER_FILE
    if not path.is_file():
        raise error(f"{printable(folder)} holds no {LEDGER_FILE}; give a folder of ms-data clean")
    content = read_bytes(path, error=error, limit_bytes=LIMIT_BYTES)
    record = decode_json(content, PassRecord, where=path, error=error)
    if sealed(record, "checksum") != content or record.tally.faults():
        raise error(f"{printable(path)}: damaged; write the folder anew")
    return record


def finished(
    folder: Path, kind: str, recipe: dict[str, Any], source: Corpus, out: str | Path
) -> LedgerSummary | None:
    """Return the summary of the finished pass in `folder`, if it is the one asked for.

    Raises:
        OutputError: it is another pass, of which it names what differs; or files are damaged.
    """
    path = folder / LEDGER_FILE
    if not os.path.exists(path):
        return None
    record = read_record(folder, error=OutputError)
    differing = differences(record.kind, record.recipe, kind, recipe)
    if record.listing != source.listing:
        differing.append("the corpus has other files, or other content")
    changed = source.changed_since(path.stat().st_mtime_ns)
    if changed and not differing and source.content() != record.content:
        differing.append(f"the corpus has other content, as {printable(changed)} may")
    if differing:
        raise OutputError(
            f"{printable(out)} is not empty: it holds other work: {'; '.join(differing)}; choose "
            "another folder, or remove it"
        )
    for entry in record.files:
        there = folder / entry.name
        size = there.stat().st_size if there.exists() else 0
        if size != entry.size_bytes:
            raise OutputError(
                f"{printable(there)}: damaged: {size} bytes where {entry.size_bytes} were written; "
                f"remove {printable(out)} and run the same again"
            )
    return record.summary(out, done_before=True)


def differences(
    kind: str, recipe: dict[str, Any], other_kind: str, other: dict[str, Any]
) -> list[str]:
    """Name what differs between two passes, with both values."""
    if kind != other_kind:
        return [f"it is of `ms-data {kind}`, not `ms-data {other_kind}`"]
    names = [*recipe, *(name for name in other if name not in recipe)]
    return [
        f"{name} is {_shown(other.get(name))}, was {_shown(recipe.get(name))}"
        for name in names
        if recipe.get(name) != other.get(name)
    ]


def digest(content: bytes) -> str:
    """Compute the hexadecimal xxh3-128 of some bytes."""
    return xxhash.xxh3_128_hexdigest(content)


def _shown(value: object) -> str:
    return "not given" if value is None else printable(repr(value))


def _counts(tallies: dict[str, ReasonTally]) -> dict[str, int]:
    found = {reason: one.documents for reason, one in tallies.items()}
    return dict(sorted(found.items(), key=lambda one: (-one[1], one[0])))
