"""Applies rules to a batch of documents in a worker process."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from ms_data.cleaning.rows import RowRule
from ms_data.cleaning.rule import Change, Drop, Rule
from ms_data.cleaning.rule_file import make_rule
from ms_data.cleaning.text import Text
from ms_data.cleaning.words import Splitter, splitter
from ms_data.engine.batches import DocumentBatch, Item
from ms_data.ledger.output import BatchResult, compress_lines, document_line
from ms_data.ledger.tally import Entry, Example, ReasonTally, Tally, shorten


class CleaningSetup(msgspec.Struct, frozen=True):
    """Settings of a worker process."""

    words: str
    rules: list[tuple[str, dict[str, Any]]]
    """Rule names with all their settings."""
    near_duplicates: dict[int, int] = {}
    """Rows with an earlier near-duplicate, by row number; the value is the number of differing
    bits."""


class Verdict(NamedTuple):
    """Outcome of a document."""

    text: str | None
    """The cleaned text; None if the document is dropped."""
    entry: Entry
    excerpt: str
    """Excerpt of a dropped document, as the rule saw it."""
    cuts: list[tuple[str, ReasonTally]]


def prepare(setup: bytes) -> Callable[[bytes], bytes]:
    """Return the function that cleans a batch; request and result are msgpack."""
    settings = msgspec.msgpack.decode(setup, type=CleaningSetup)
    rules = [make_rule(name, values, where="the rules") for name, values in settings.rules]
    split = splitter(settings.words)
    decoder = msgspec.msgpack.Decoder(DocumentBatch)

    def work(request: bytes) -> bytes:
        result = clean_batch(decoder.decode(request), rules, split, settings.near_duplicates)
        return msgspec.msgpack.encode(result)

    return work


def clean_batch(
    batch: DocumentBatch, rules: Sequence[Rule], split: Splitter, near_duplicates: Mapping[int, int]
) -> BatchResult:
    """Apply rules to the documents of a batch, and drop the rows in `near`."""
    tally = Tally()
    documents: list[bytes] = []
    ledger: list[bytes] = []
    for number, item in enumerate(batch.items, batch.first):
        text, entry, excerpt, cuts = judge(number, item, rules, split)
        if text is not None and number in near_duplicates:
            entry.fate, entry.bytes_out, entry.reason = "dropped", 0, "pictures.near_bits"
            entry.value = near_duplicates[number]
            excerpt, text = shorten(text), None
        if text is not None:
            # A row is written as it was read, a text with its columns.
            row_rules = isinstance(rules[0], RowRule)
            line = text.encode() if row_rules else document_line(text, item.location, item.columns)
            documents.append(line)
            for reason, cut in cuts:
                tally.cuts.setdefault(reason, ReasonTally()).merge(cut)
        ledger.append(msgspec.json.encode(entry))
        tally.count(entry, excerpt)
    return BatchResult((compress_lines(documents), compress_lines(ledger)), tally)


def judge(number: int, item: Item, rules: Sequence[Rule], split: Splitter) -> Verdict:
    """Apply rules to one document, in order, until one drops it."""
    entry = Entry(document=number, place=item.location, fate="kept")
    if item.text is None:
        entry.fate = "quarantined"
        return Verdict(None, entry, "", [])
    entry.bytes_in = len(item.text.encode())
    text = Text(item.text, split)
    cuts: list[tuple[str, ReasonTally]] = []
    for rule in rules:
        # The language is detected once per text, and again after a change.
        if rule.languages and text.language not in rule.languages:
            continue
        outcome = rule.apply(text)
        if isinstance(outcome, Change):
            size = len(text.text.encode()) - len(outcome.text.encode())
            if outcome.text != text.text:
                entry.changes = entry.changes | {rule.name: size}
            cuts += [_cut_tally(entry, rule, *cut) for cut in outcome.cuts]
            # A new object, as words and language of the changed text are computed again.
            old_text, text = text, Text(outcome.text, split)
            if not outcome.text.strip():
                # The excerpt shows the text before.
                outcome, text = Drop("nothing_left", 0, 1), old_text
        if isinstance(outcome, Drop):
            entry.fate, entry.changes = "dropped", {}  # dropped with all of its bytes
            entry.reason = f"{rule.name}.{outcome.setting}"
            entry.value, entry.limit = outcome.value, outcome.limit
            return Verdict(None, entry, shorten(text.text) if rule.shown else "", [])
    entry.bytes_out = len(text.text.encode())
    return Verdict(text.text, entry, "", cuts)


def _cut_tally(
    entry: Entry, rule: Rule, setting: str, times: int, size_bytes: int, example: str
) -> tuple[str, ReasonTally]:
    examples = []
    if example:
        examples = [Example(entry.document, entry.place, None, shorten(example))]
    return f"{rule.name}.{setting}", ReasonTally(times, size_bytes, examples)
