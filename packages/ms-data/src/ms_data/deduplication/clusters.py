"""Joins documents that are alike into clusters, and chooses the one of each that is kept."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ms_data.deduplication.options import DedupOptions
from ms_data.deduplication.records import FACTS, RECORD
from ms_data.deduplication.sorting import Buckets, Records, runs, with_first

_EDGE = np.dtype([("one", "<u4"), ("other", "<u4")])
_MEMBER = np.dtype([("key", "<u8"), ("better", "<u4"), ("document", "<u4")])
"""A document of a cluster; the key is the least number in it, from the first bit on."""
_CHUNK = 1 << 20

Labels = NDArray[np.uint32]


class Cluster(msgspec.Struct, frozen=True):
    """Documents that are alike: a line of `clusters.jsonl`."""

    kept: int
    """The number of the one that is kept."""
    documents: list[int]
    """All of them, in the order of the corpus."""


class Chosen(NamedTuple):
    """A cluster, and which of it is kept."""

    kept: int
    documents: Labels
    """All of them, in the order of the corpus."""

    def lines(self) -> Iterator[bytes]:
        """The JSON of its `Cluster`, in parts of bounded size, with a line's end."""
        yield b'{"kept":%d,"documents":[' % self.kept
        for start in range(0, len(self.documents), _CHUNK):
            numbers = msgspec.json.encode(self.documents[start : start + _CHUNK].tolist())
            yield (b"," if start else b"") + numbers[1:-1]
        yield b"]}\n"


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
        """Add a pair for each record after the first of a run of the same key and check."""
        first = runs(records, "key", "check")
        again = first != np.arange(len(records))
        edges = np.zeros(int(again.sum()), _EDGE)
        edges["one"] = records["document"][first[again]]
        edges["other"] = records["document"][again]
        with self._path.open("ab") as file:
            file.write(np.unique(edges[edges["one"] != edges["other"]]).tobytes())

    def read(self) -> Iterator[tuple[Labels, Labels]]:
        """Yield all pairs, many at a time."""
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
    for part in with_first(buckets.sorted()):
        edges.add(part)
    joined = Joined(folder / f"{name}.labels", documents)
    joined.join(edges)
    return joined


def choose(folder: Path, labels: Labels, facts: Records, options: DedupOptions) -> Iterator[Chosen]:
    """Choose the document of each cluster that is kept; in the order of their first documents.

    Members are sorted in files by their cluster, so that one cluster is in memory at a time, or
    some small ones.

    Args:
        folder: for files that are not kept.
        labels: the least number that each document is joined with.
        facts: `FACTS` of each document.
        options: which one is kept.
    """
    assert facts.dtype == FACTS
    shift = np.uint64(64 - max(1, len(labels).bit_length()))
    members = Buckets(folder / "clusters", _MEMBER, len(labels) * _MEMBER.itemsize)
    for start in range(0, len(labels), _CHUNK):
        own = labels[start : start + _CHUNK]
        later = start + np.flatnonzero(own != _numbers(labels, start))
        found: Records = np.zeros(len(later), _MEMBER)
        found["key"] = labels[later].astype(np.uint64) << shift
        found["document"], found["better"] = later, _better(facts, later, options)
        members.add(found)
    for part in _whole_keys(members.sorted()):
        keys = np.unique(part["key"])
        roots: Records = np.zeros(len(keys), _MEMBER)
        roots["key"] = keys
        roots["document"] = roots["key"] >> shift
        roots["better"] = _better(facts, roots["document"], options)
        every: Records = np.concatenate((roots, part))
        every = every[np.lexsort((every["document"], every["better"], every["key"]))]
        for one in np.split(every["document"], np.flatnonzero(np.diff(every["key"])) + 1):
            yield Chosen(int(one[0]), np.sort(one))


def _better(
    facts: Records, documents: NDArray[np.integer], options: DedupOptions
) -> NDArray[np.integer]:
    """Rank documents from 0 to 2**32 - 1: the least is kept, of equal ones the first."""
    ranks: dict[str, NDArray[np.integer]] = {
        "longest": np.iinfo(np.uint32).max - facts["size"][documents],
        "priority": facts["rank"][documents],
        "first": documents,
    }
    return ranks[options.keep]


def _whole_keys(parts: Iterable[Records]) -> Iterator[Records]:
    """Put the parts of one key together again."""
    waiting: list[Records] = []
    for part in parts:
        if waiting and waiting[-1]["key"][-1] != part["key"][0]:
            yield np.concatenate(waiting)
            waiting.clear()
        waiting.append(part)
    if waiting:
        yield np.concatenate(waiting)


def _numbers(labels: Labels, start: int) -> Labels:
    return np.arange(start, min(start + _CHUNK, len(labels)), dtype=np.uint32)
