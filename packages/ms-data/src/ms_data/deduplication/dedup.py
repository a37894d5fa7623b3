"""Deduplicates a corpus: the same text, nearly the same text, and parts that stood before.

A first pass hashes every document; the hashes are sorted in files, so that memory does not grow
with the corpus; a second pass writes what is kept.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from attrs import asdict, evolve, frozen

from ms_data.corpus.corpus import Corpus
from ms_data.corpus.find import CorpusName, find_corpus
from ms_data.corpus.reader import DOCUMENT_LIMIT_MIB
from ms_data.deduplication.apply import Decided
from ms_data.deduplication.clusters import Labels, choose, join_alike
from ms_data.deduplication.minhash import SIGNATURES
from ms_data.deduplication.options import DedupOptions
from ms_data.deduplication.records import FACTS, RECORD
from ms_data.deduplication.signatures import SignatureFrame, SignatureSetup, read_frames
from ms_data.deduplication.substrings import find_repeated
from ms_data.errors import SettingError
from ms_data.passes.array_jobs import ArrayShard, merged
from ms_data.passes.pool import worker_count
from ms_data.passes.record import LedgerSummary, PassRecord, read_record
from ms_data.passes.run import WITHOUT_STRICT, Pass, reading_recipe

CLUSTERS = "clusters.jsonl"
_SCRATCH = "scratch"


def dedup(
    corpus: CorpusName,
    *,
    out: str | Path,
    options: DedupOptions | None = None,
    workers: int | str | None = None,
    shard_size_mib: int = 64,
    text_column: str = "text",
    strict: bool = False,
    document_limit_mib: int = DOCUMENT_LIMIT_MIB,
    shard: str | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_quarantine: Callable[[str], None] = lambda reason: None,
) -> LedgerSummary:
    """Write a corpus with one document of each group that is alike, and a ledger.

    Args:
        corpus: files, folders or addresses of text and tables, or `stdlib`; see `find_corpus`.
        out: the folder to make: that of `clean`, and `clusters.jsonl`, a line for those alike.
        options: what counts as a duplicate, and which one is kept.
        workers: processes; None: one a core; or a Ray cluster: `ray`, or `ray://HOST:PORT`.
        shard_size_mib: a file is closed at the first MiB of text past this size, once packed.
        text_column: the member or column of a row that holds the text.
        strict: stop at a document that cannot be read instead of naming it and going on.
        document_limit_mib: a longer document, once unpacked, cannot be read.
        shard: `3/16` hashes the third part for an array of 16 jobs; `merge/16` does the rest.
        on_progress: called with the bytes that are done, and all, in each of the two passes.
        on_quarantine: called with the place and fault of what cannot be read.

    Raises:
        SettingError: an argument or option cannot be used.
        CorpusError: the corpus is missing, empty or damaged, or with `strict` not text.
        OutputError: `out` cannot be written, or holds something else.
    """
    chosen = _checked(options or DedupOptions())
    source = find_corpus(
        corpus,
        text_column=text_column,
        skip_invalid=not strict,
        columns=True,
        document_limit_mib=document_limit_mib,
        skip_hint=WITHOUT_STRICT,
    )
    last = Pass(
        kind="dedup",
        corpus=corpus,
        source=source,
        recipe={**reading_recipe(source, shard_size_mib), **_recipe(chosen)},
        work="ms_data.deduplication.apply:prepare",
        prepare=lambda folder: b"",
        workers=worker_count(workers),
        shard_size_mib=shard_size_mib,
        on_progress=on_progress,
        on_quarantine=lambda reason: None,
        scratch=_SCRATCH,
        extra=(CLUSTERS,),
    )
    job = ArrayShard.parse(shard, out, corpus)
    first = evolve(_signing(last, _plain(chosen), on_quarantine), shard=job)
    return _perform(first, evolve(last, prepare=_Decide(first, source, chosen).run), out)


def _perform(first: Pass, last: Pass, out: str | Path) -> LedgerSummary:
    """Do both passes, or this job's part of the first one."""
    job = first.shard
    if job is not None and job.number:
        return last.finished_summary(out) or first.publish(job.folder / "signatures")
    return merged(job, last.publish(out))


def _plain(options: DedupOptions) -> dict[str, Any]:
    """Turn options into what JSON gives back of them, so that they compare."""
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(asdict(options)))
    return plain


def _recipe(options: DedupOptions) -> dict[str, Any]:
    """Return what decides which documents are kept."""
    return {**_plain(options), "signatures": SIGNATURES}


def _checked(options: DedupOptions) -> DedupOptions:
    if not (options.exact or options.minhash or options.substring_words):
        raise SettingError("nothing is looked for; give exact, minhash or substring_words")
    return options


def _signing(last: Pass, options: dict[str, Any], on_quarantine: Callable[[str], None]) -> Pass:
    """Return the first pass, which hashes all documents and names what cannot be read."""
    return evolve(
        last,
        kind="dedup signatures",
        work="ms_data.deduplication.signatures:prepare",
        prepare=lambda folder: msgspec.msgpack.encode(SignatureSetup(options)),
        on_quarantine=on_quarantine,
        corpus=[],
        scratch="",
        extra=(),
    )


@frozen
class _Decide:
    """Decides between the two passes which documents are kept."""

    first: Pass
    source: Corpus
    options: DedupOptions

    def run(self, folder: Path) -> bytes:
        """Hash all documents, and decide which are kept."""
        scratch = folder / _SCRATCH
        scratch.mkdir(exist_ok=True)
        signatures = scratch / "signatures"
        self.first.publish(signatures)
        record = read_record(signatures)
        facts = np.memmap(scratch / "facts", FACTS, "w+", shape=(record.tally.documents,))
        for frame in read_frames(signatures, record):
            found = np.frombuffer(frame.facts, FACTS)
            facts[frame.first : frame.first + len(found)] = found
        keeper = self._keepers(folder, record, facts)
        if self.options.substring_words:
            find_repeated(
                scratch,
                self._records(record, signatures, "windows"),
                keeper,
                words=self.options.substring_words,
                size_bytes=sum(one.size_bytes for one in record.files),
            )
        return msgspec.msgpack.encode(Decided(str(scratch), bool(self.options.substring_words)))

    def _keepers(self, folder: Path, record: PassRecord, facts: np.ndarray[Any, Any]) -> Labels:
        """Join what is alike, write the clusters, and map each document to the one kept."""
        scratch, count = folder / _SCRATCH, len(facts)
        size = count * RECORD.itemsize
        signatures = scratch / "signatures"
        exact = join_alike(
            scratch,
            "exact",
            self._records(record, signatures, "exact"),
            documents=count,
            size_bytes=size,
        )
        alike = join_alike(
            scratch,
            "alike",
            self._records(record, signatures, "exact", "near"),
            documents=count,
            size_bytes=size * (self.options.bands + 1),
        )
        keeper = np.memmap(scratch / "keeper", np.uint32, "w+", shape=(count,))
        same = np.memmap(scratch / "same", np.bool_, "w+", shape=(count,))
        keeper[:] = np.arange(count, dtype=np.uint32)
        with (folder / CLUSTERS).open("wb") as file:
            for cluster in choose(scratch, alike.labels, facts, self.options):
                file.writelines(cluster.lines())
                keeper[cluster.documents] = cluster.kept
                labels = exact.labels[cluster.documents]
                same[cluster.documents] = labels == exact.labels[cluster.kept]
        keeper.flush()
        same.flush()
        return keeper

    def _records(self, record: PassRecord, folder: Path, *names: str) -> Iterator[bytes]:
        for frame in read_frames(folder, record):
            for name in names:
                yield _part(frame, name)


def _part(frame: SignatureFrame, name: str) -> bytes:
    content: bytes = getattr(frame, name)
    return content
