"""Deduplicates a corpus: exact duplicates, near duplicates, and repeated parts of documents.

A first run hashes every document. The hashes are sorted in files, so memory does not grow with the
corpus. A second run writes the kept documents.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from attrs import asdict

from ms_data.arguments import check_callable, check_type
from ms_data.corpus.arguments import check_paths
from ms_data.corpus.find import CorpusName, find_corpus
from ms_data.corpus.reader import DOCUMENT_LIMIT_MIB
from ms_data.deduplication.apply import DecisionFiles
from ms_data.deduplication.clusters import Labels, choose, join_equal_keys
from ms_data.deduplication.minhash import SIGNATURES
from ms_data.deduplication.options import DedupOptions
from ms_data.deduplication.signatures import SignatureSetup, read_frames
from ms_data.deduplication.sorting import DOCUMENT, RECORD
from ms_data.deduplication.substrings import find_repeated
from ms_data.engine.array_jobs import ArrayShard
from ms_data.engine.pools import worker_count
from ms_data.errors import SettingError
from ms_data.ledger.output import WITHOUT_STRICT, LedgerRun, ledger_run, reading_recipe
from ms_data.ledger.record import LedgerRecord, LedgerSummary, read_record
from ms_data.settings.arguments import check_flags

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
    """Deduplicate a corpus, and write one document of each cluster and a ledger.

    Args:
        corpus: files, folders or URLs of text and tables, or `stdlib`; see `find_corpus`.
        out: output folder, as for `clean`, with `clusters.jsonl`: one line per cluster.
        options: criteria for duplicates and for the document to keep.
        workers: number of processes, or a Ray cluster, `ray` or `ray://HOST:PORT`. None: one
            process per core.
        shard_size_mib: approximate maximum size of an output file, compressed.
        text_column: column or JSON key with the text of a row.
        strict: stop at an unreadable document instead of reporting and skipping it.
        document_limit_mib: a longer document (uncompressed) counts as unreadable.
        shard: `3/16` hashes the third of 16 parts of an array job; `merge/16` does the rest.
        on_progress: called with the bytes done and the total, in each of the two passes.
        on_quarantine: called with location and reason for every unreadable document.

    Raises:
        SettingError: an argument or option is invalid.
        CorpusError: the corpus is missing, empty or damaged, or with `strict` not text.
        OutputError: `out` cannot be written, or holds something else.
    """
    check_callable("on_progress", on_progress, error=SettingError)
    check_callable("on_quarantine", on_quarantine, error=SettingError)
    check_flags(strict=strict)
    check_type("options", options, DedupOptions, "DedupOptions", error=SettingError, optional=True)
    check_paths(out, corpus=corpus)
    dedup_options = _check_options(options or DedupOptions())
    source = find_corpus(
        corpus,
        text_column=text_column,
        skip_invalid=not strict,
        columns=True,
        document_limit_mib=document_limit_mib,
        skip_hint=WITHOUT_STRICT,
    )
    recipe = {
        **reading_recipe(source, shard_size_mib),
        **_plain(dedup_options),
        "signatures": SIGNATURES,
    }
    make_run = partial(
        ledger_run,
        source=source,
        recipe=recipe,
        workers=worker_count(workers),
        shard_size_mib=shard_size_mib,
        on_progress=on_progress,
    )
    job = None if shard is None else ArrayShard.parse(shard, out, corpus)
    # The first run writes its hashes to a scratch folder of the last one; see `_choose_documents`.
    first = make_run(
        "dedup signatures",
        [],
        function="ms_data.deduplication.signatures:prepare",
        setup=lambda folder: msgspec.msgpack.encode(SignatureSetup(_plain(dedup_options))),
        on_skip=on_quarantine,
        shard=job,
    )
    last = make_run(
        "dedup",
        corpus,
        function="ms_data.deduplication.apply:prepare",
        setup=partial(_choose_documents, first, dedup_options),
        on_skip=lambda reason: None,  # reported by the first run
        scratch=_SCRATCH,
        extra=(CLUSTERS,),
    )
    if job is not None and not job.merges:
        # A job of an array only hashes its part, unless the merge has been done already.
        return last.finished(out) or first.publish(job.folder / "signatures")
    summary = last.publish(out)
    if job is not None:
        job.remove_merged()
    return summary


def _plain(options: DedupOptions) -> dict[str, Any]:
    """Convert options to the values that JSON returns for them, for comparison with saved ones."""
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(asdict(options)))
    return plain


def _check_options(options: DedupOptions) -> DedupOptions:
    if not (options.exact or options.minhash or options.substring_words):
        raise SettingError("no criterion is enabled; set exact, minhash or substring_words")
    return options


def _choose_documents(first: LedgerRun, options: DedupOptions, folder: Path) -> bytes:
    """Hash all documents, choose those to keep, and return the setup of the workers of `apply`."""
    scratch = folder / _SCRATCH
    scratch.mkdir(exist_ok=True)
    signatures = scratch / "signatures"
    first.publish(signatures)
    record = read_record(signatures)
    # On disk, by document number, as the corpus may have billions of documents.
    facts = np.memmap(scratch / "facts", DOCUMENT, "w+", shape=(record.tally.documents,))
    for frame in read_frames(signatures, record):
        frame_facts = np.frombuffer(frame.facts, DOCUMENT)
        facts[frame.first : frame.first + len(frame_facts)] = frame_facts
    keeper = _keepers(folder, record, facts, options)
    if options.substring_words:
        find_repeated(
            scratch,
            _records(signatures, record, "windows"),
            keeper,
            words=options.substring_words,
            size_bytes=sum(file.size_bytes for file in record.files),
        )
    return msgspec.msgpack.encode(DecisionFiles(str(scratch), bool(options.substring_words)))


def _keepers(
    folder: Path, record: LedgerRecord, facts: np.ndarray[Any, Any], options: DedupOptions
) -> Labels:
    """Join similar documents, write the clusters, and map every document to the kept one."""
    scratch, count = folder / _SCRATCH, len(facts)
    size = count * RECORD.itemsize
    signatures = scratch / "signatures"
    exact = join_equal_keys(
        scratch,
        "exact",
        _records(signatures, record, "exact"),
        documents=count,
        size_bytes=size,
    )
    similar = join_equal_keys(
        scratch,
        "alike",
        _records(signatures, record, "exact", "near"),
        documents=count,
        size_bytes=size * (options.bands + 1),  # one exact key and one key per band
    )
    # (documents,) kept document for each document
    keeper = np.memmap(scratch / "keeper", np.uint32, "w+", shape=(count,))
    # (documents,) exact duplicate of it
    same = np.memmap(scratch / "same", np.bool_, "w+", shape=(count,))
    keeper[:] = np.arange(count, dtype=np.uint32)  # a document outside all clusters keeps itself
    with (folder / CLUSTERS).open("wb") as file:
        for cluster in choose(scratch, similar.labels, facts, options):
            file.writelines(cluster.lines())
            keeper[cluster.documents] = cluster.keeper
            labels = exact.labels[cluster.documents]
            same[cluster.documents] = labels == exact.labels[cluster.keeper]
    keeper.flush()
    same.flush()
    return keeper


def _records(signatures: Path, record: LedgerRecord, *fields: str) -> Iterator[bytes]:
    for frame in read_frames(signatures, record):
        for field in fields:
            yield getattr(frame, field)
