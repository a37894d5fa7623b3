"""Joins similar documents into clusters, and chooses the document to keep from each."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ms_data.deduplication.options import DedupOptions
from ms_data.deduplication.sorting import (
    DOCUMENT,
    RECORD,
    Buckets,
    Records,
    repeat_first_record,
    runs,
)

_EDGE = np.dtype([("one", "<u4"), ("other", "<u4")])
_MEMBER = np.dtype([("key", "<u8"), ("better", "<u4"), ("document", "<u4")])
"""A document of a cluster; the key is the cluster's smallest document number, in the high bits."""
_CHUNK = 1 << 20

Labels = NDArray[np.uint32]


class Cluster(msgspec.Struct, frozen=True):
    """Similar documents: a line of `clusters.jsonl`."""

    kept: int
    """Number of the kept document."""
    documents: list[int]
    """Numbers of all documents, in the order of the corpus."""


class ChosenCluster(NamedTuple):
    """A cluster, with the choice of the kept document."""

    keeper: int
    documents: Labels
    """Numbers of all documents, in the order of the corpus."""

    def lines(self) -> Iterator[bytes]:
        """Yield the JSON line of the `Cluster`, in parts of bounded size."""
        yield b'{"kept":%d,"documents":[' % self.keeper
        for start in range(0, len(self.documents), _CHUNK):
            numbers = msgspec.json.encode(self.documents[start : start + _CHUNK].tolist())
            yield (b"," if start else b"") + numbers[1:-1]
        yield b"]}\n"


class Components:
    """Connected components: the label of a document is the smallest number in its component.

    Labels are in a memory-mapped file, so memory does not grow with the corpus.
    """

    def __init__(self, path: Path, documents: int) -> None:
        self.labels: Labels = np.memmap(path, np.uint32, "w+", shape=(documents,))
        for start in range(0, documents, _CHUNK):
            part = self.labels[start : start + _CHUNK]
            part[:] = np.arange(start, start + len(part), dtype=np.uint32)

    def join(self, edges: "Edges") -> None:
        """Join the two ends of all edges."""
        # Propagate minimum labels along the edges until nothing changes.
        changed = True
        while changed:
            changed = False
            for source, target in edges.read():
                changed |= self._lower(source, target)

    def _lower(self, sources: Labels, targets: Labels) -> bool:
        labels = self.labels
        source_labels, target_labels = labels[sources], labels[targets]
        differ = source_labels != target_labels
        if not differ.any():
            return False
        sources, targets, source_labels, target_labels = (
            values[differ] for values in (sources, targets, source_labels, target_labels)
        )
        smallest = np.minimum(source_labels, target_labels)
        for updated in (source_labels, target_labels, sources, targets):
            np.minimum.at(labels, updated, smallest)
        for updated in (sources, targets):  # pointer jumping
            labels[updated] = labels[labels[updated]]
        return True


class Edges:
    """Pairs of similar documents, in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.write_bytes(b"")

    def add(self, records: Records) -> None:
        """Add an edge from the first record of every run of equal key and check to the others."""
        # index of the first record with the same key and check
        first = runs(records, "key", "check")
        repeated = first != np.arange(len(records))
        edges = np.zeros(int(repeated.sum()), _EDGE)
        edges["one"] = records["document"][first[repeated]]
        edges["other"] = records["document"][repeated]
        with self._path.open("ab") as file:
            file.write(np.unique(edges[edges["one"] != edges["other"]]).tobytes())

    def read(self) -> Iterator[tuple[Labels, Labels]]:
        """Yield all edges, in blocks."""
        with self._path.open("rb") as file:
            while content := file.read(_CHUNK * _EDGE.itemsize):
                edges = np.frombuffer(content, _EDGE)
                yield edges["one"], edges["other"]


def join_equal_keys(
    folder: Path, name: str, records: Iterable[bytes], *, documents: int, size_bytes: int
) -> Components:
    """Join documents whose `RECORD`s have an equal key and check.

    Args:
        folder: folder for temporary files.
        name: name of these files.
        records: encoded records, in blocks.
        documents: number of documents.
        size_bytes: approximate size of all records.
    """
    buckets = Buckets(folder / name, RECORD, size_bytes)
    for content in records:
        buckets.add(np.frombuffer(content, RECORD))
    edges = Edges(folder / f"{name}.edges")
    for part in repeat_first_record(buckets.sorted()):
        edges.add(part)
    components = Components(folder / f"{name}.labels", documents)
    # Edges are read again until no label changes; memory holds only the labels.
    components.join(edges)
    return components


def choose(
    folder: Path, labels: Labels, facts: Records, options: DedupOptions
) -> Iterator[ChosenCluster]:
    """Choose the document to keep from every cluster, in the order of the first documents.

    Members are sorted by cluster in files, so that memory holds only one large cluster or several
    small ones at a time.

    Args:
        folder: folder for temporary files.
        labels: smallest number in the component of each document.
        facts: a `DOCUMENT` record of each document.
        options: the criterion.
    """
    assert facts.dtype == DOCUMENT
    # The document number in the high key bits makes the buckets split by cluster.
    shift = np.uint64(64 - max(1, len(labels).bit_length()))
    members = Buckets(folder / "clusters", _MEMBER, len(labels) * _MEMBER.itemsize)
    for start in range(0, len(labels), _CHUNK):
        block = labels[start : start + _CHUNK]
        # The smallest member of a cluster has its own number as label; it is added below.
        duplicates = start + np.flatnonzero(block != _numbers(labels, start))
        rows: Records = np.zeros(len(duplicates), _MEMBER)
        rows["key"] = labels[duplicates].astype(np.uint64) << shift
        rows["document"], rows["better"] = duplicates, _keep_order(facts, duplicates, options)
        members.add(rows)
    for part in _merge_split_keys(members.sorted()):
        keys = np.unique(part["key"])
        roots: Records = np.zeros(len(keys), _MEMBER)
        roots["key"] = keys
        roots["document"] = roots["key"] >> shift
        roots["better"] = _keep_order(facts, roots["document"], options)
        combined: Records = np.concatenate((roots, part))
        combined = combined[np.lexsort((combined["document"], combined["better"], combined["key"]))]
        for cluster in np.split(combined["document"], np.flatnonzero(np.diff(combined["key"])) + 1):
            yield ChosenCluster(int(cluster[0]), np.sort(cluster))


def _keep_order(
    facts: Records, documents: NDArray[np.integer], options: DedupOptions
) -> NDArray[np.integer]:
    """Return sort keys of documents: the smallest is kept, of equal ones the first."""
    ranks: dict[str, NDArray[np.integer]] = {
        "longest": np.iinfo(np.uint32).max - facts["size"][documents],
        "priority": facts["rank"][documents],
        "first": documents,
    }
    return ranks[options.keep]


def _merge_split_keys(parts: Iterable[Records]) -> Iterator[Records]:
    """Concatenate parts so that no key is split between two."""
    pending: list[Records] = []
    for part in parts:
        if pending and pending[-1]["key"][-1] != part["key"][0]:
            yield np.concatenate(pending)
            pending.clear()
        pending.append(part)
    if pending:
        yield np.concatenate(pending)


def _numbers(labels: Labels, start: int) -> Labels:
    return np.arange(start, min(start + _CHUNK, len(labels)), dtype=np.uint32)
