"""Finds the rows of words that stood before, for every document that is kept."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ms_data.deduplication.clusters import Labels
from ms_data.deduplication.records import SPAN, WINDOW
from ms_data.deduplication.sorting import Buckets, Records, runs, with_first

_CHUNK = 1 << 20


def find_repeated(
    folder: Path, records: Iterable[bytes], keeper: Labels, *, words: int, size_bytes: int
) -> tuple[Path, Path]:
    """Write which words of each document stood before.

    Of rows that overlap in one document, the words of the first stay.

    Args:
        folder: for the files.
        records: `WINDOW`s of all documents as bytes, many at a time.
        keeper: which document is kept for each; those that are dropped count for nothing.
        words: of a row.
        size_bytes: of all records, about.

    Returns:
        The files of spans, in the order of documents, and of where those of each begin.
    """
    documents = len(keeper)
    shift = np.uint64(64 - max(1, documents.bit_length()))
    buckets = Buckets(folder / "windows", WINDOW, size_bytes)
    for content in records:
        found = np.frombuffer(content, WINDOW)
        buckets.add(found[keeper[found["document"]] == found["document"]])
    spans = Buckets(folder / "spans", SPAN, size_bytes)
    for part in with_first(buckets.sorted()):
        spans.add(_repeated(part, words, shift))
    path, starts = folder / "spans.bin", folder / "spans.starts"
    counts = np.memmap(starts, np.uint64, "w+", shape=(documents + 1,))
    with path.open("wb") as file:
        for part in spans.sorted():
            joined = joined_spans(part)
            file.write(joined.tobytes())
            held, number = np.unique(joined["key"] >> shift, return_counts=True)
            counts[held + np.uint64(1)] += number.astype(np.uint64)
    before = np.uint64(0)
    for start in range(0, documents + 1, _CHUNK):
        part = counts[start : start + _CHUNK]
        np.cumsum(part, out=part)
        part += before
        before = part[-1]
    counts.flush()
    return path, starts


def _repeated(records: Records, words: int, shift: np.uint64) -> Records:
    """The words of rows that are not the first of their kind."""
    first = runs(records, "key")
    again = first != np.arange(len(records))
    one, other = records[first[again]], records[again]
    spans = np.zeros(len(other), SPAN)
    spans["key"] = other["document"].astype(np.uint64) << shift
    own = np.where(one["document"] == other["document"], one["word"] + np.uint32(words), 0)
    spans["first"] = np.maximum(other["word"], own)
    spans["end"] = other["word"] + np.uint32(words)
    return spans[spans["first"] < spans["end"]]


def joined_spans(spans: Records) -> Records:
    """Join spans of a document that meet, so that fewer hold the same words."""
    spans = spans[np.lexsort((spans["first"], spans["key"]))]
    document = np.cumsum(np.diff(spans["key"], prepend=spans["key"][:1]) != 0).astype(np.uint64)
    # Each document lies behind the one before, so that the furthest end is of the same one.
    first, end = ((document << np.uint64(32)) + spans[name] for name in ("first", "end"))
    furthest = np.maximum.accumulate(end)
    fresh = np.ones(len(spans), bool)
    fresh[1:] = first[1:] > furthest[:-1]
    starts = np.flatnonzero(fresh)
    joined = spans[starts]
    last = np.append(starts[1:], len(spans)) - 1
    joined["end"] = (furthest[last] & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    return joined
