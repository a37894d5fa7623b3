"""Runs a pass over a corpus: batches go to worker processes, results to files, in fixed order.

A pass works in `OUT.partial`, which is renamed to OUT when everything is synced. Every few seconds
it syncs its output and saves its progress in a journal. After a crash, the same command resumes
from the journal and produces identical bytes.
"""

import os
import re
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import zstandard
from attrs import frozen

from ms_data.corpus.corpus import Corpus
from ms_data.corpus.find import CorpusName
from ms_data.errors import CorpusError, OutputError
from ms_data.files.durable import publish, sync_tree, writing
from ms_data.files.untrusted import check_path
from ms_data.files.work_folder import (
    JOURNAL,
    check_outside_corpus,
    load_journal,
    resolve_output,
    save_journal,
    work_folder,
)
from ms_data.passes.array_jobs import ArrayShard, StoredResults, read_results, request_key
from ms_data.passes.batches import PassProgress, ReadBatch, read_batches
from ms_data.passes.output import FileEntry, SeriesWriter, file_entry
from ms_data.passes.pool import map_ordered
from ms_data.passes.record import (
    LEDGER_FILE,
    LedgerSummary,
    PassRecord,
    differences,
    finished_summary,
    save_record,
)
from ms_data.passes.tally import Tally
from ms_data.settings.arguments import check_counts

SAVE_EVERY_S = 5.0
"""Seconds between saves of the journal, about the work lost when a pass is killed."""

WITHOUT_STRICT = "; without --strict it is skipped and reported"
"""Remedy for a document that stops a pass."""

SERIES = ("documents", "ledger")

_PASS_FILES = re.compile(
    r"((documents|ledger)(/part-\d{5,}\.jsonl\.zst)?|scratch(\.partial)?(/.*)?|ledger\.json|"
    r"clusters\.jsonl|journal\.msgpack)(\.partial)?"
)
"""Names of all files that a pass writes."""


def reading_recipe(source: Corpus, shard_size_mib: int) -> dict[str, Any]:
    """Return the read and write settings that determine the output.

    Raises:
        SettingError: the shard size is below 1.
    """
    check_counts(shard_size_mib=shard_size_mib)
    return {
        "shard_size_mib": shard_size_mib,
        "text_column": source.options.text_column,
        "columns": "kept",
        "document_limit_mib": source.options.document_limit_mib,
        "strict": not source.options.skip_invalid,
        "libraries": f"zstandard {zstandard.__version__}",
    }


class PassResult(msgspec.Struct, frozen=True, array_like=True):
    """Output of a worker process for one batch."""

    frames: tuple[bytes, bytes]
    """Documents and ledger entries, each a zstd frame of JSON Lines; empty if there are none."""
    tally: Tally


class PassJournal(msgspec.Struct, frozen=True, kw_only=True, tag="ms-data.pass.2"):
    """State of a pass at a moment when everything it counts is synced to disk."""

    kind: str
    recipe: dict[str, Any]
    progress: PassProgress
    files_read: str
    """Checksum of paths, sizes and times of the files read so far."""
    series: dict[str, tuple[FileEntry, ...]]
    tally: Tally


@frozen(kw_only=True)
class Pass:
    """A pass to run."""

    command: str
    """The command, such as `clean`."""
    source: Corpus
    recipe: Mapping[str, Any]
    """Everything that determines the output, apart from the corpus, as JSON values."""
    work: str
    """`module:function`; the function takes `setup` and returns the function that converts an
    encoded `Batch` to an encoded `PassResult`."""
    workers: int | str
    """Number of processes, or the address of a Ray cluster."""
    shard_size_mib: int
    on_progress: Callable[[int, int], None]
    """Called with the corpus bytes done and the total."""
    on_quarantine: Callable[[str], None]
    """Called with location and reason for every unreadable document."""
    prepare: Callable[[Path], bytes]
    """Returns `setup`, given the work folder."""
    corpus: CorpusName
    """The corpus argument as the user wrote it."""
    scratch: str = ""
    """Temporary folder in the work folder, which `prepare` fills."""
    extra: tuple[str, ...] = ()
    """Additional output files that `prepare` writes."""
    shard: ArrayShard | None = None
    """This job's part of an array job."""

    def finished_summary(self, out: str | Path) -> LedgerSummary | None:
        """Return the summary if `out` holds this finished pass already.

        Raises:
            OutputError: `out` holds something else.
        """
        check_path("out", out, error=OutputError, written="folder")
        with writing(Path(out)):
            folder = Path(os.path.realpath(out))
            return finished_summary(folder, self.command, dict(self.recipe), self.source, out)

    def publish(self, out: str | Path) -> LedgerSummary:
        """Run or resume the pass, then rename the work folder to `out`.

        Raises:
            CorpusError: the corpus holds no documents, or a file is damaged.
            OutputError: `out` cannot be written, or holds something else.
        """
        if (summary := self.finished_summary(out)) is not None:
            return summary
        # a job of an array writes results, not OUT
        if self.shard is not None and self.shard.number:
            return self._run_shard(self.shard)
        folder = resolve_output(out)
        for path in [self.corpus] if isinstance(self.corpus, str | Path) else self.corpus:
            check_outside_corpus(folder, path)
        partial = folder.with_name(folder.name + ".partial")
        with work_folder(partial, _PASS_FILES):
            record = self._run(partial)
            save_record(partial, record)
            if self.scratch:
                old_scratch = partial / f"{self.scratch}.partial"
                # Rename first: a partly deleted folder must not look like a complete one.
                (partial / self.scratch).rename(old_scratch)
                shutil.rmtree(old_scratch)
            (partial / JOURNAL).unlink(missing_ok=True)
            sync_tree(partial)
            publish(partial, folder)
        return record.summary(out)

    def _run_shard(self, shard: ArrayShard) -> LedgerSummary:
        """Process this job's batches of an array job."""
        path, tally = shard.path(), Tally()
        if not (already_done := path.exists()):
            with shard.writing(self._settings_key) as writer:
                # All jobs read the same batches, and each processes its share of them.
                batches = enumerate(read_batches(self.source, PassProgress(), lambda reason: None))
                encoded = ((n, read, msgspec.msgpack.encode(read.batch)) for n, read in batches)
                requests = (
                    ((read, key), request)
                    for n, read, request in encoded
                    if writer.wants(n, key := request_key(request))
                )
                setup = self.prepare(shard.folder)
                results = map_ordered(self.work, setup, requests, workers=self.workers)
                with closing(results):
                    for (read, key), content in results:
                        writer.add(key, content)
                        self.on_progress(read.read_bytes, self.source.size_bytes)
        with path.open("rb") as file:
            for _, offset, size in read_results(path, self._settings_key):
                file.seek(offset)
                tally.merge(msgspec.msgpack.decode(file.read(size), type=PassResult).tally)
        summary = LedgerSummary.of(str(path), tally, {}, path.stat().st_size)
        return msgspec.structs.replace(summary, done_before=already_done)

    @property
    def _settings_key(self) -> bytes:
        return request_key(msgspec.json.encode([self.command, self.recipe]))

    def _results(
        self, setup: bytes, requests: Iterator[tuple[ReadBatch, bytes]]
    ) -> Generator[tuple[ReadBatch, bytes], None, None]:
        """Process batches, or look up the results of an array job."""
        if self.shard is None:
            yield from map_ordered(self.work, setup, requests, workers=self.workers)
            return
        stored = StoredResults(self.shard, self._settings_key)
        # The last batch may be empty, and array jobs do not store empty batches.
        empty = msgspec.msgpack.encode(PassResult((b"", b""), Tally()))
        for read, request in requests:
            yield read, stored.find(request_key(request)) if read.batch.items else empty

    def _run(self, folder: Path) -> PassRecord:
        journal = self._load_journal(folder)
        _remove_unsaved(folder, journal.series if journal else {})
        # For dedup, this runs the first pass and chooses the documents to keep.
        setup = self.prepare(folder)
        tally = journal.tally if journal else Tally()
        progress = journal.progress if journal else PassProgress()
        writers: dict[str, SeriesWriter] = {}
        last_save = time.monotonic()
        unreadable, first_fault = 0, ""

        def quarantine(reason: str) -> None:
            nonlocal unreadable, first_fault
            unreadable, first_fault = unreadable + 1, first_fault or reason
            self.on_quarantine(reason)

        requests = (
            (read, msgspec.msgpack.encode(read.batch))
            for read in read_batches(self.source, progress, quarantine)
        )
        try:
            for name in SERIES:
                entries = journal.series[name] if journal else ()
                size = self.shard_size_mib << 20
                writers[name] = SeriesWriter(folder, name, shard_size_bytes=size, entries=entries)
            with closing(self._results(setup, requests)) as results:
                for read, content in results:
                    result = msgspec.msgpack.decode(content, type=PassResult)
                    for writer, frame in zip(writers.values(), result.frames, strict=True):
                        writer.write(frame)
                    tally.merge(result.tally)
                    progress = read.progress
                    self.on_progress(read.read_bytes, self.source.size_bytes)
                    if time.monotonic() - last_save >= SAVE_EVERY_S:
                        self._save(folder, progress, writers, tally)
                        last_save = time.monotonic()
            if not tally.documents:
                raise CorpusError(
                    f"{self.source.name} is empty: it holds no documents; use a corpus with text"
                )
            if unreadable == tally.documents:  # most likely a wrong column or format
                raise CorpusError(f"no document of {self.source.name} can be read: {first_fault}")
            return self._record(folder, progress, writers, tally)
        finally:
            for writer in writers.values():
                writer.abandon()

    def _load_journal(self, folder: Path) -> PassJournal | None:
        journal = load_journal(folder, PassJournal)
        if journal is None:
            return None
        changes = differences(journal.kind, journal.recipe, self.command, dict(self.recipe))
        if self.source.files_digest(journal.progress.position.file + 1) != journal.files_read:
            changes.append("the corpus has different files or content")
        if changes:
            raise OutputError(
                f"{folder} holds an interrupted run with different settings: "
                f"{'; '.join(changes)}; use the same settings, or remove the folder"
            )
        return journal

    def _save(
        self,
        folder: Path,
        progress: PassProgress,
        writers: Mapping[str, SeriesWriter],
        tally: Tally,
    ) -> None:
        journal = PassJournal(
            kind=self.command,
            recipe=dict(self.recipe),
            progress=progress,
            files_read=self.source.files_digest(progress.position.file + 1),
            series={name: writer.sync() for name, writer in writers.items()},
            tally=tally,
        )
        save_journal(folder, journal)

    def _record(
        self,
        folder: Path,
        progress: PassProgress,
        writers: Mapping[str, SeriesWriter],
        tally: Tally,
    ) -> PassRecord:
        faults = tally.faults()
        assert not faults, faults
        written = tuple(entry for writer in writers.values() for entry in writer.finish())
        return PassRecord(
            kind=self.command,
            recipe=dict(self.recipe),
            listing=self.source.listing_digest,
            content=self.source.content_digest(),
            tally=tally,
            left_out=progress.left_out,
            empty=progress.empty,
            files=(*written, *(file_entry(folder, name) for name in self.extra)),
        )


def _remove_unsaved(folder: Path, saved_series: Mapping[str, tuple[FileEntry, ...]]) -> None:
    """Remove files that an earlier run wrote after its last save."""
    names = {entry.name for entries in saved_series.values() for entry in entries} | {JOURNAL}
    for series in SERIES:
        for path in (folder / series).glob("*"):
            if str(path.relative_to(folder)) not in names:
                path.unlink()
    for path in (folder / LEDGER_FILE, *folder.glob("*.partial")):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
