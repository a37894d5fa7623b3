"""Joins documents that are alike into clusters, and chooses the one of each that is kept."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from ms_data.deduplication.options import DedupOptions
from ms_data.deduplication.records import FACTS, RECORD
from ms_data.deduplication.sorting import Buckets, Records, runs

_EDGE = np.dtype([("one", "<u4"), ("other", "<u4")])
_CHUNK = 1 << 20

Labels = NDArray[np.uint32]


class Cluster(msgspec.Struct, frozen=True):
    """Documents that are alike: a line of `clusters.jsonl`."""

    kept: int
    """The number of the one that is kept."""
    documents: list[int]
    """All of them, in the order of the corpus."""


class Joined:
    """Clusters as a label for each document: the least number that it is joined with.

    Labels lie in a mapped file, so that memory does not grow with the corpus.
    """

    def __init__(self, path: Path, documents: int) -> None:
        self.labels: Labels = np.memmap(path, np.uint32, "w+", shape=(documents,))
        for start in range(0, documents, _CHUNK):
            part = self.labels[start : start + _CHUNK]
            part[:] = np.arange(start, start + len(part), dtype=np.uint32)

    def join(self, edges: "Edges") -> None:
        """Join the two ends of every edge, and whatever these are joined with."""
        changed = True
        while changed:
            changed = False
            for one, other in edges.read():
                changed |= self._lower(one, other)

    def _lower(self, one: Labels, other: Labels) -> bool:
        labels = self.labels
        low, high = labels[one], labels[other]
        differing = low != high
        if not differing.any():
            return False
        one, other, low, high = (each[differing] for each in (one, other, low, high))
        least = np.minimum(low, high)
        for place in (low, high, one, other):
            np.minimum.at(labels, place, least)
        for place in (one, other):
            labels[place] = labels[labels[place]]
        return True


class Edges:
    """Pairs of documents that are alike, in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.write_bytes(b"")

    def add(self, records: Records) -> None:
        """Take the runs of sorted records of the same key and check."""
        first = runs(records, "key", "check")
        again = first != np.arange(len(records))
        edges = np.zeros(int(again.sum()), _EDGE)
        edges["one"] = records["document"][first[again]]
        edges["other"] = records["document"][again]
        with self._path.open("ab") as file:
            file.write(np.unique(edges[edges["one"] != edges["other"]]).tobytes())

    def read(self) -> Iterator[tuple[Labels, Labels]]:
        """Give all pairs, many at a time."""
        with self._path.open("rb") as file:
            while content := file.read(_CHUNK * _EDGE.itemsize):
                edges = np.frombuffer(content, _EDGE)
                yield edges["one"], edges["other"]


def join_alike(
    folder: Path, name: str, records: Iterable[bytes], *, documents: int, size_bytes: int
) -> Joined:
    """Join the documents of which `RECORD`s have the same key.

    Args:
        folder: for files that are not kept.
        name: of these files.
        records: as bytes, many at a time.
        documents: how many there are.
        size_bytes: of all records, about.
    """
    buckets = Buckets(folder / name, RECORD, size_bytes)
    for content in records:
        buckets.add(np.frombuffer(content, RECORD))
    edges = Edges(folder / f"{name}.edges")
    for part in buckets.sorted():
        edges.add(part)
    joined = Joined(folder / f"{name}.labels", documents)
    joined.join(edges)
    return joined


def choose(labels: Labels, facts: Records, options: DedupOptions) -> Iterator[Cluster]:
    """Choose the document of each cluster that is kept; in the order of their first documents."""
    assert facts.dtype == FACTS
    later = np.concatenate(
        [
            start + np.flatnonzero(labels[start : start + _CHUNK] != _numbers(labels, start))
            for start in range(0, len(labels), _CHUNK)
        ]
    )
    roots = np.unique(labels[later])
    members = np.concatenate((roots, later.astype(np.uint32)))
    label = labels[members]
    first = members.astype(np.int64)
    better = {
        "first": first,
        "longest": -facts["size"][members].astype(np.int64),
        "priority": facts["rank"][members].astype(np.int64),
    }[options.keep]
    order = np.lexsort((first, better, label))
    ends = np.flatnonzero(np.diff(label[order])) + 1
    for part in np.split(members[order], ends):
        if len(part):
            yield Cluster(int(part[0]), sorted(part.tolist()))


def _numbers(labels: Labels, start: int) -> Labels:
    return np.arange(start, min(start + _CHUNK, len(labels)), dtype=np.uint32)
