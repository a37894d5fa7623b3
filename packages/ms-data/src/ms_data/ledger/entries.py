"""Reads the ledger of a finished run."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import zstandard
from attrs import define, field

from ms_data.corpus.unpacking import decompress_blocks, split_lines
from ms_data.errors import SettingError, printable
from ms_data.ledger.record import LedgerRecord
from ms_data.ledger.tally import Entry, Tally

_MAX_VALUES = 100_000
_LINE_BYTES = 1 << 24
_SHOWN_QUARANTINED = 50


@define
class MeasuredValues:
    """Values that a rule measured in the documents that it dropped."""

    limit: float | None = None
    count: int = 0
    samples: list[float] = field(factory=list)
    """The first measured values."""

    def add(self, value: float, limit: object) -> None:
        """Add one value."""
        self.count += 1
        if len(self.samples) < _MAX_VALUES:
            self.samples.append(value)
        if isinstance(limit, int | float):
            self.limit = limit

    @property
    def are_fractions(self) -> bool:
        """Whether the limit and all values are between 0 and 1."""
        return self.limit is not None and all(
            0 <= value <= 1 for value in (self.limit, *self.samples)
        )

    def bins(self, count: int) -> list[tuple[float, int]]:
        """Return a histogram with `count` bins; a single bin if all values are equal.

        Fractions are shown on an axis from 0 to 1.
        """
        low, high = (0.0, 1.0) if self.are_fractions else (min(self.samples), max(self.samples))
        if high == low:
            return [(low, len(self.samples))]
        # Labels are spread so that the first and the last bin are labeled with the extremes.
        width = (high - low) / count
        counts = Counter(min(count - 1, int((value - low) / width)) for value in self.samples)
        return [
            (low + width * index * count / max(1, count - 1), counts[index])
            for index in range(count)
        ]


@define
class Findings:
    """Contents of a ledger, for the report."""

    values: dict[str, MeasuredValues] = field(factory=dict)
    """Measured values, by rule and setting."""
    files: dict[str, Counter[str]] = field(factory=dict)
    """Number of documents per outcome, by file."""
    quarantined: list[str] = field(factory=list)
    """The first unreadable documents."""


def read_ledger(folder: Path, record: LedgerRecord) -> Iterator[Entry]:
    """Yield all entries of a ledger.

    Raises:
        SettingError: a file is missing or damaged.
    """
    decoder = msgspec.json.Decoder(Entry)
    for path in (folder / file.name for file in record.files if file.name.startswith("ledger/")):
        try:
            with path.open("rb") as file:
                for line in split_lines(decompress_blocks(file, "zst"), _LINE_BYTES):
                    yield decoder.decode(line or b"")
        except (
            OSError,
            EOFError,
            zstandard.ZstdError,
            msgspec.MsgspecError,
            UnicodeError,
        ) as error:
            raise SettingError(
                f"{printable(path)}: damaged: {error}; run the command again"
            ) from error


def read_findings(folder: Path, record: LedgerRecord) -> Findings:
    """Read a ledger and check that its totals match the record.

    Raises:
        SettingError: the ledger is damaged.
    """
    findings, tally = Findings(), Tally()
    for entry in read_ledger(folder, record):
        tally.count(entry)
        if entry.fate == "quarantined":
            # The report only shows the first ones.
            if len(findings.quarantined) < _SHOWN_QUARANTINED:
                findings.quarantined.append(entry.place)
            continue
        name = entry.place.rpartition("#")[0]
        findings.files.setdefault(name, Counter())[entry.fate] += 1
        if entry.fate == "dropped" and isinstance(entry.value, int | float):
            findings.values.setdefault(entry.reason, MeasuredValues()).add(entry.value, entry.limit)
    if (tally.documents, tally.kept, tally.bytes_out) != (
        record.tally.documents,
        record.tally.kept,
        record.tally.bytes_out,
    ):
        raise SettingError(f"{printable(folder)}: the ledger is damaged; run the command again")
    return findings
