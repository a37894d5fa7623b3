"""Counts documents and bytes by outcome; the totals always add up."""

from typing import Literal

import msgspec

EXAMPLES = 3
EXCERPT_CHARACTERS = 160
SIZES = 34
"""Number of size classes; class n holds documents of 2ⁿ⁻¹ to 2ⁿ - 1 bytes."""

Fate = Literal["kept", "dropped", "quarantined"]


class Entry(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A line of the ledger: the outcome of one document."""

    document: int
    """Index in the corpus, from 0."""
    place: str
    """File name in the corpus and document number in the file."""
    fate: Fate
    bytes_in: int = 0
    bytes_out: int = 0
    reason: str = ""
    """Rule and setting that decided, such as `gopher_quality.min_words`."""
    value: float | str | None = None
    """Value that the rule measured."""
    limit: float | str | None = None
    """Value of the setting."""
    changes: dict[str, int] = {}
    """Bytes removed, by rule; negative if the rule added bytes."""


class Example(msgspec.Struct, frozen=True):
    """A document or line that a rule dropped."""

    document: int
    place: str
    value: float | str | None
    excerpt: str


class ReasonTally(msgspec.Struct):
    """Documents and bytes dropped or changed for one reason."""

    documents: int = 0
    size_bytes: int = 0
    examples: list[Example] = []

    def add(self, size_bytes: int, example: Example | None, documents: int = 1) -> None:
        """Count one document."""
        self.documents += documents
        self.size_bytes += size_bytes
        if example is not None and len(self.examples) < EXAMPLES:
            self.examples = [*self.examples, example]

    def merge(self, other: "ReasonTally") -> None:
        """Add the tally of later documents."""
        self.documents += other.documents
        self.size_bytes += other.size_bytes
        self.examples = (self.examples + other.examples)[:EXAMPLES]


class Tally(msgspec.Struct, kw_only=True):
    """Totals over all documents.

    documents = kept + dropped + quarantined, and bytes_in = bytes_out + bytes of dropped documents
    + bytes removed from kept documents.
    """

    documents: int = 0
    kept: int = 0
    quarantined: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    dropped: dict[str, ReasonTally] = {}
    """Dropped documents, by rule and setting."""
    changed: dict[str, ReasonTally] = {}
    """Kept documents with changes, and the bytes removed, by rule."""
    cuts: dict[str, ReasonTally] = {}
    """Parts of documents that were cut or masked, by rule and setting."""
    sizes_in: list[int] = []
    """Documents per size class."""
    sizes_out: list[int] = []

    def count(self, entry: Entry, excerpt: str = "") -> None:
        """Count one ledger entry."""
        self.documents += 1
        self.bytes_in += entry.bytes_in
        self.bytes_out += entry.bytes_out
        if entry.fate == "quarantined":  # unreadable, so without a size
            self.quarantined += 1
            return
        self.sizes_in = _count_size(self.sizes_in, entry.bytes_in)
        if entry.fate == "dropped":
            example = Example(entry.document, entry.place, entry.value, excerpt)
            _get_or_create(self.dropped, entry.reason).add(entry.bytes_in, example)
            return
        self.kept += 1
        self.sizes_out = _count_size(self.sizes_out, entry.bytes_out)
        for rule, size in entry.changes.items():
            _get_or_create(self.changed, rule).add(size, None)

    def merge(self, other: "Tally") -> None:
        """Add the tally of later documents."""
        for name in ("documents", "kept", "quarantined", "bytes_in", "bytes_out"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("dropped", "changed", "cuts"):
            for reason, tally in getattr(other, name).items():
                _get_or_create(getattr(self, name), reason).merge(tally)
        self.sizes_in = _sum(self.sizes_in, other.sizes_in)
        self.sizes_out = _sum(self.sizes_out, other.sizes_out)

    @property
    def dropped_documents(self) -> int:
        """Number of dropped documents."""
        return sum(tally.documents for tally in self.dropped.values())

    def faults(self) -> list[str]:
        """Return the totals that do not add up."""
        faults = []
        if self.documents != self.kept + self.dropped_documents + self.quarantined:
            faults.append(
                f"{self.documents} documents are not {self.kept} kept, {self.dropped_documents} "
                f"dropped and {self.quarantined} quarantined"
            )
        dropped = sum(tally.size_bytes for tally in self.dropped.values())
        changed = sum(tally.size_bytes for tally in self.changed.values())
        if self.bytes_in != self.bytes_out + dropped + changed:
            faults.append(
                f"{self.bytes_in} bytes are not {self.bytes_out} kept, {dropped} dropped and "
                f"{changed} removed"
            )
        return faults


def shorten(text: str) -> str:
    """Return the beginning of a text as one line."""
    # Twice the length, as runs of white space shrink to one space.
    head = " ".join(text[: 2 * EXCERPT_CHARACTERS].split())
    cut = head if len(head) <= EXCERPT_CHARACTERS else f"{head[:EXCERPT_CHARACTERS]}..."
    return cut.encode(errors="replace").decode()  # lone surrogates have no UTF-8


def _get_or_create(tallies: dict[str, ReasonTally], reason: str) -> ReasonTally:
    if reason not in tallies:
        tallies[reason] = ReasonTally()
    return tallies[reason]


def _count_size(sizes: list[int], size_bytes: int) -> list[int]:
    size_class = min(size_bytes.bit_length(), SIZES - 1)
    sizes = sizes + [0] * (size_class + 1 - len(sizes))
    sizes[size_class] += 1
    return sizes


def _sum(first: list[int], second: list[int]) -> list[int]:
    longer, shorter = (first, second) if len(first) >= len(second) else (second, first)
    return [n + (shorter[index] if index < len(shorter) else 0) for index, n in enumerate(longer)]
