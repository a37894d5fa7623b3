"""Finds word spans of the kept documents that already occurred earlier in the corpus."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ms_data.deduplication.clusters import Labels
from ms_data.deduplication.sorting import SPAN, WINDOW, Buckets, Records, repeat_first_record, runs

_CHUNK = 1 << 20


def find_repeated(
    folder: Path, records: Iterable[bytes], keeper: Labels, *, words: int, size_bytes: int
) -> tuple[Path, Path]:
    """Write the repeated word spans of each document.

    If repeated windows overlap within one document, the words of the first one are kept.

    Args:
        folder: output folder.
        records: encoded `WINDOW`s of all documents, in blocks.
        keeper: the kept document for each document; dropped documents are ignored.
        words: words per window.
        size_bytes: approximate size of all records.

    Returns:
        The file of spans in document order, and the file with the index of each document's first
        span.
    """
    documents = len(keeper)
    shift = np.uint64(64 - max(1, documents.bit_length()))
    buckets = Buckets(folder / "windows", WINDOW, size_bytes)
    for content in records:
        windows = np.frombuffer(content, WINDOW)
        buckets.add(windows[keeper[windows["document"]] == windows["document"]])
    spans = Buckets(folder / "spans", SPAN, size_bytes)
    for part in repeat_first_record(buckets.sorted()):
        spans.add(_repeated_spans(part, words, shift))
    path, starts = folder / "spans.bin", folder / "spans.starts"
    counts = np.memmap(starts, np.uint64, "w+", shape=(documents + 1,))
    with path.open("wb") as file:
        for part in spans.sorted():
            joined = join_spans(part)
            file.write(joined.tobytes())
            numbers, span_counts = np.unique(joined["key"] >> shift, return_counts=True)
            counts[numbers + np.uint64(1)] += span_counts.astype(np.uint64)
    # Turn counts into offsets by a cumulative sum in blocks.
    before = np.uint64(0)
    for start in range(0, documents + 1, _CHUNK):
        part = counts[start : start + _CHUNK]
        np.cumsum(part, out=part)
        part += before
        before = part[-1]
    counts.flush()
    return path, starts


def _repeated_spans(records: Records, words: int, shift: np.uint64) -> Records:
    """Return the spans of windows that are not the first of their kind."""
    first = runs(records, "key")  # the first window of each kind is kept
    is_repeated = first != np.arange(len(records))
    original, repeated = records[first[is_repeated]], records[is_repeated]
    spans = np.zeros(len(repeated), SPAN)
    spans["key"] = repeated["document"].astype(np.uint64) << shift
    # In one document, a window may overlap its original, whose words are kept.
    original_end = np.where(
        original["document"] == repeated["document"], original["word"] + np.uint32(words), 0
    )
    spans["first"] = np.maximum(repeated["word"], original_end)
    spans["end"] = repeated["word"] + np.uint32(words)
    return spans[spans["first"] < spans["end"]]


def join_spans(spans: Records) -> Records:
    """Join overlapping and adjacent spans of a document."""
    spans = spans[np.lexsort((spans["first"], spans["key"]))]
    document = np.cumsum(np.diff(spans["key"], prepend=spans["key"][:1]) != 0).astype(np.uint64)
    # Offset the spans by document, so that the running maximum never crosses documents.
    first, end = ((document << np.uint64(32)) + spans[name] for name in ("first", "end"))
    # A span starts a new group if it begins after all earlier ends.
    furthest = np.maximum.accumulate(end)
    is_start = np.ones(len(spans), bool)
    is_start[1:] = first[1:] > furthest[:-1]
    starts = np.flatnonzero(is_start)
    joined = spans[starts]
    last = np.append(starts[1:], len(spans)) - 1
    joined["end"] = (furthest[last] & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    return joined
