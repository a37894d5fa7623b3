"""Record of a finished ledger: sources, settings, outcome of the documents, and output files."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ms_data.corpus.corpus import Corpus
from ms_data.corpus.file_kinds import omissions
from ms_data.disk.format import encode_sealed
from ms_data.engine.record import changes_since, check_sizes
from ms_data.errors import OutputError, SettingError, printable
from ms_data.files.untrusted import decode_json, read_bytes
from ms_data.ledger.series import FileEntry
from ms_data.ledger.tally import ReasonTally, Tally

LEDGER_FILE = "ledger.json"
LIMIT_BYTES = 1 << 26


class LedgerSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `clean` or `dedup`."""

    folder: str
    documents: int
    """documents = kept + dropped + quarantined."""
    kept: int
    dropped: dict[str, int]
    """Number of dropped documents, by rule and setting."""
    quarantined: int
    """Number of unreadable documents."""
    left_out: dict[str, int]
    """Number of skipped non-text files, by file type."""
    bytes_in: int
    """UTF-8 bytes of the documents."""
    bytes_out: int
    size_bytes: int
    """Size of the kept documents on disk."""
    empty: int = 0
    """Rows, lines and files without text."""
    done_before: bool = False
    """Whether the output existed already, so that nothing was done."""

    @classmethod
    def of(
        cls, folder: str, tally: Tally, left_out: dict[str, int], size_bytes: int, empty: int = 0
    ) -> "LedgerSummary":
        """Summarize a tally."""
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
        """Skipped documents and files as the end of a line; empty if nothing was skipped."""
        return omissions(self.left_out, empty=self.empty)


class LedgerRecord(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="ms-data.ledger.2"
):
    """Sources, settings and output of a run."""

    kind: str
    """The command, such as `clean`."""
    recipe: dict[str, Any]
    """Everything that determines the output, apart from the corpus."""
    listing: str
    """Checksum of the names and sizes of the corpus files."""
    content: str
    """Checksum of the content of the corpus files."""
    tally: Tally
    left_out: dict[str, int]
    empty: int
    files: tuple[FileEntry, ...]
    checksum: str = ""
    """xxh3-128 of this record with an empty checksum, hexadecimal."""

    def summary(self, folder: str | Path, *, done_before: bool = False) -> LedgerSummary:
        """Summarize the record."""
        documents = [file for file in self.files if file.name.startswith("documents/")]
        size_bytes = sum(file.size_bytes for file in documents)
        summary = LedgerSummary.of(str(folder), self.tally, self.left_out, size_bytes, self.empty)
        return msgspec.structs.replace(summary, done_before=done_before)


def read_record(folder: Path, *, error: type[Exception] = SettingError) -> LedgerRecord:
    """Read and check the record of a finished run.

    Raises:
        error: the record is missing or damaged.
    """
    path = folder / LEDGER_FILE
    if not path.is_file():
        raise error(
            f"{printable(folder)} holds no {LEDGER_FILE}; pass an output folder of ms-data clean"
        )
    content = read_bytes(path, error=error, limit_bytes=LIMIT_BYTES)
    record = decode_json(content, LedgerRecord, where=path, error=error)
    # A record whose totals do not add up is as useless as a damaged one.
    if encode_sealed(record, "checksum") != content or record.tally.faults():
        raise error(f"{printable(path)}: damaged; run the command again")
    return record


def finished_summary(
    folder: Path, command: str, recipe: Mapping[str, Any], source: Corpus, out: str | Path
) -> LedgerSummary | None:
    """Return the summary if `folder` holds this finished run, None if it holds none.

    Raises:
        OutputError: the folder holds another run (names the differences), or damaged files.
    """
    path = folder / LEDGER_FILE
    if not os.path.exists(path):
        return None
    record = read_record(folder, error=OutputError)
    same_command = record.kind == command
    # The settings of another command cannot be compared, only the corpus.
    changes = changes_since(path, record, recipe if same_command else record.recipe, source)
    if not same_command:
        changes.insert(0, f"it was written by `ms-data {record.kind}`, not `ms-data {command}`")
    if changes:
        raise OutputError(
            f"{printable(out)} is not empty: it holds another run: {'; '.join(changes)}; use "
            "another folder, or remove it"
        )
    check_sizes(
        folder,
        ((entry.name, entry.size_bytes) for entry in record.files),
        remedy=f"remove {printable(out)} and run the same command again",
    )
    return record.summary(out, done_before=True)


def _counts(tallies: dict[str, ReasonTally]) -> dict[str, int]:
    counts = {reason: tally.documents for reason, tally in tallies.items()}
    return dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))
