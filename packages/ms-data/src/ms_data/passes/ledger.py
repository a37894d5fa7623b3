"""Reads the ledger of a finished pass, line by line."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import zstandard
from attrs import define, field

from ms_data.corpus.unpacking import lines_of, unpacked
from ms_data.errors import SettingError, printable
from ms_data.passes.record import PassRecord
from ms_data.passes.tally import Entry, Tally

_KEPT_VALUES = 100_000
_LINE_BYTES = 1 << 24
_SHOWN_QUARANTINED = 50


@define
class Values:
    """What a rule found in the documents that it dropped."""

    limit: float | None = None
    count: int = 0
    found: list[float] = field(factory=list)
    """The first of them."""

    def add(self, value: float, limit: object) -> None:
        """Take one value."""
        self.count += 1
        if len(self.found) < _KEPT_VALUES:
            self.found.append(value)
        if isinstance(limit, int | float):
            self.limit = limit

    @property
    def are_shares(self) -> bool:
        """Whether the limit and all values are between 0 and 1."""
        return self.limit is not None and all(0 <= one <= 1 for one in (self.limit, *self.found))

    def bins(self, count: int) -> list[tuple[float, int]]:
        """Count the values in each of so many equal parts; equal values are one part.

        Shares are counted on an axis from 0 to 1.
        """
        least, most = (0.0, 1.0) if self.are_shares else (min(self.found), max(self.found))
        if most == least:
            return [(least, len(self.found))]
        width = (most - least) / count
        placed = Counter(min(count - 1, int((one - least) / width)) for one in self.found)
        return [(least + width * at * count / max(1, count - 1), placed[at]) for at in range(count)]


@define
class Findings:
    """What lines of a ledger say together."""

    values: dict[str, Values] = field(factory=dict)
    files: dict[str, Counter[str]] = field(factory=dict)
    """Fates of the documents of each file."""
    quarantined: list[str] = field(factory=list)
    """The first of them."""


def read_ledger(folder: Path, record: PassRecord) -> Iterator[Entry]:
    """Read all lines of a ledger.

    Raises:
        SettingError: a file is missing or damaged.
    """
    decoder = msgspec.json.Decoder(Entry)
    for path in (folder / one.name for one in record.files if one.name.startswith("ledger/")):
        try:
            with path.open("rb") as file:
                for line in lines_of(unpacked(file, "zst"), _LINE_BYTES):
                    yield decoder.decode(line or b"")
        except (
            OSError,
            EOFError,
            zstandard.ZstdError,
            msgspec.MsgspecError,
            UnicodeError,
        ) as error:
            raise SettingError(f"{printable(path)}: damaged: {error}; write it anew") from error


def read_findings(folder: Path, record: PassRecord) -> Findings:
    """Read a ledger, and check that it adds up to its record.

    Raises:
        SettingError: it is damaged.
    """
    found, tally = Findings(), Tally()
    for entry in read_ledger(folder, record):
        tally.count(entry)
        if entry.fate == "quarantined":
            if len(found.quarantined) < _SHOWN_QUARANTINED:
                found.quarantined.append(entry.place)
            continue
        name = entry.place.rpartition("#")[0]
        found.files.setdefault(name, Counter())[entry.fate] += 1
        if entry.fate == "dropped" and isinstance(entry.value, int | float):
            found.values.setdefault(entry.reason, Values()).add(entry.value, entry.limit)
    if (tally.documents, tally.kept, tally.bytes_out) != (
        record.tally.documents,
        record.tally.kept,
        record.tally.bytes_out,
    ):
        raise SettingError(f"{printable(folder)}: its ledger is damaged; write the folder anew")
    return found
