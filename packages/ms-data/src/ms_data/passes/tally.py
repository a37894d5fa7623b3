"""Counts what became of documents, so that it adds up: in = kept + dropped + quarantined."""

from typing import Literal

import msgspec

EXAMPLES = 3
EXCERPT_CHARACTERS = 160
SIZES = 34
"""Classes of sizes: class n holds documents of 2ⁿ⁻¹ to 2ⁿ - 1 bytes."""

Fate = Literal["kept", "dropped", "quarantined"]


class Entry(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What became of one document: a line of the ledger."""

    document: int
    """Its number in the corpus, from 0."""
    place: str
    """The file's name in the corpus and the document's number in it."""
    fate: Fate
    bytes_in: int = 0
    bytes_out: int = 0
    reason: str = ""
    """The rule and its setting that decided, as `gopher_quality.min_words`."""
    value: float | str | None = None
    """What the rule found."""
    limit: float | str | None = None
    """What the setting asks."""
    changes: dict[str, int] = {}
    """Bytes that each rule took away, by rule; below 0 where it added some."""


class Example(msgspec.Struct, frozen=True):
    """One document or line that a rule dropped."""

    document: int
    place: str
    value: float | str | None
    excerpt: str


class ReasonTally(msgspec.Struct):
    """What one reason dropped, or changed."""

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
        """Add what came after."""
        self.documents += other.documents
        self.size_bytes += other.size_bytes
        self.examples = (self.examples + other.examples)[:EXAMPLES]


class Tally(msgspec.Struct, kw_only=True):
    """What became of all documents.

    documents = kept + dropped + quarantined, and bytes_in = bytes_out + what was dropped + what
    was taken away from documents that were kept.
    """

    documents: int = 0
    kept: int = 0
    quarantined: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    dropped: dict[str, ReasonTally] = {}
    """Documents dropped, by the rule and setting that decided."""
    changed: dict[str, ReasonTally] = {}
    """Documents that were kept and changed, and the bytes taken away, by rule."""
    cuts: dict[str, ReasonTally] = {}
    """Parts of documents that rules found and cut or masked, by rule and setting."""
    sizes_in: list[int] = []
    """Documents by size class."""
    sizes_out: list[int] = []

    def count(self, entry: Entry, excerpt: str = "") -> None:
        """Count one line of the ledger."""
        self.documents += 1
        self.bytes_in += entry.bytes_in
        self.bytes_out += entry.bytes_out
        if entry.fate == "quarantined":
            self.quarantined += 1
            return
        self.sizes_in = _with(self.sizes_in, entry.bytes_in)
        if entry.fate == "dropped":
            example = Example(entry.document, entry.place, entry.value, excerpt)
            _at(self.dropped, entry.reason).add(entry.bytes_in, example)
            return
        self.kept += 1
        self.sizes_out = _with(self.sizes_out, entry.bytes_out)
        for rule, size in entry.changes.items():
            _at(self.changed, rule).add(size, None)

    def merge(self, other: "Tally") -> None:
        """Add the tally of what came after."""
        for name in ("documents", "kept", "quarantined", "bytes_in", "bytes_out"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("dropped", "changed", "cuts"):
            for reason, tally in getattr(other, name).items():
                _at(getattr(self, name), reason).merge(tally)
        self.sizes_in = _sum(self.sizes_in, other.sizes_in)
        self.sizes_out = _sum(self.sizes_out, other.sizes_out)

    @property
    def dropped_documents(self) -> int:
        """Documents dropped for whatever reason."""
        return sum(one.documents for one in self.dropped.values())

    def faults(self) -> list[str]:
        """Return what does not add up; nothing where all does."""
        found = []
        if self.documents != self.kept + self.dropped_documents + self.quarantined:
            found.append(
                f"{self.documents} documents are not {self.kept} kept, {self.dropped_documents} "
                f"dropped and {self.quarantined} quarantined"
            )
        dropped = sum(one.size_bytes for one in self.dropped.values())
        changed = sum(one.size_bytes for one in self.changed.values())
        if self.bytes_in != self.bytes_out + dropped + changed:
            found.append(
                f"{self.bytes_in} bytes are not {self.bytes_out} kept, {dropped} dropped and "
                f"{changed} taken away"
            )
        return found


def excerpt_of(text: str) -> str:
    """The beginning of a text in one line."""
    head = " ".join(text[: 2 * EXCERPT_CHARACTERS].split())
    cut = head if len(head) <= EXCERPT_CHARACTERS else f"{head[:EXCERPT_CHARACTERS]}..."
    return cut.encode(errors="replace").decode()


def _at(tallies: dict[str, ReasonTally], reason: str) -> ReasonTally:
    if reason not in tallies:
        tallies[reason] = ReasonTally()
    return tallies[reason]


def _with(sizes: list[int], size_bytes: int) -> list[int]:
    at = min(size_bytes.bit_length(), SIZES - 1)
    sizes = sizes + [0] * (at + 1 - len(sizes))
    sizes[at] += 1
    return sizes


def _sum(one: list[int], other: list[int]) -> list[int]:
    longer, shorter = (one, other) if len(one) >= len(other) else (other, one)
    return [n + (shorter[at] if at < len(shorter) else 0) for at, n in enumerate(longer)]
