"""The engine of `build`, `clean` and `dedup`: runs a command over a corpus, and resumes it.

`read_batches` cuts the corpus into batches; threads, worker processes, a Ray cluster (`pools`) or
the jobs of an array (`array_jobs`) process them; `Output.write` writes the results in order.

A run works in `OUT.partial`, which is renamed to OUT when everything is synced, so OUT is either
complete or absent. Every few seconds it syncs its output and saves its progress in a journal. After
a crash, the same command resumes from the journal and produces identical bytes.
"""

import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from attrs import frozen

from ms_data.corpus.corpus import Corpus
from ms_data.corpus.find import CorpusName
from ms_data.engine.array_jobs import ArrayShard, StoredResults, read_results, request_key
from ms_data.engine.batches import DocumentBatch, Progress, ReadBatch, read_batches
from ms_data.engine.pools import Results, Work
from ms_data.engine.record import differences
from ms_data.errors import OutputError
from ms_data.files.durable import publish, sync_tree, writing
from ms_data.files.work_folder import (
    JOURNAL,
    check_outside_corpus,
    load_journal,
    resolve_output,
    save_journal,
    work_folder,
)

SAVE_EVERY_S = 5.0
"""Seconds between saves of the journal, about the work lost when a run is killed."""

R = TypeVar("R")  # result of a batch
StateT = TypeVar("StateT")  # state of the output
SummaryT = TypeVar("SummaryT", bound=msgspec.Struct)
R_contra = TypeVar("R_contra", contravariant=True)
SummaryT_co = TypeVar("SummaryT_co", bound=msgspec.Struct, covariant=True)


class Journal(msgspec.Struct, Generic[StateT], frozen=True, kw_only=True, tag="ms-data.run.1"):
    """State of a run at a moment when everything it counts is synced to disk."""

    command: str
    recipe: dict[str, Any]
    progress: Progress
    files_read: str
    """Checksum of paths, sizes and times of the files read so far."""
    output: StateT


class Output(Protocol[R_contra, StateT, SummaryT_co]):
    """The files that a run writes."""

    def finished(self, folder: Path, out: str | Path) -> SummaryT_co | None:
        """Return the summary if `folder` holds this finished run, None if it holds none."""
        ...

    def open(self, folder: Path, state: StateT | None) -> None:
        """Remove output that an earlier run wrote after its last save, and continue its files."""
        ...

    def write(self, batch: DocumentBatch, result: R_contra) -> None:
        """Write the result of the next batch."""
        ...

    def save(self) -> StateT:
        """Sync all files and return the state for a resume."""
        ...

    def finish(self, progress: Progress) -> SummaryT_co:
        """Finish all files, and write the record of the run."""
        ...

    def abandon(self) -> None:
        """Close all files without finishing them."""
        ...

    def summarize(self, file: Path, results: Iterable[bytes], done_before: bool) -> SummaryT_co:
        """Summarize the results of one job of an array."""
        ...


@frozen(kw_only=True)
class Run(Generic[R, StateT, SummaryT]):
    """A command to run over a corpus."""

    command: str
    """The command, such as `clean`."""
    corpus: CorpusName
    """The corpus argument as the user wrote it."""
    source: Corpus
    recipe: Mapping[str, Any]
    """Everything that determines the output, apart from the corpus, as JSON values."""
    work: Work[R]
    process: Callable[[Path, Iterator[ReadBatch]], Results[R]]
    """Processes batches in order, given the work folder."""
    output: Output[R, StateT, SummaryT]
    journal: type[Journal[StateT]]
    """Type of the journal, with the state of the output."""
    files: re.Pattern[str]
    """Relative paths of all files that the run writes."""
    noun: str
    """Noun for the run in messages."""
    may_change: Collection[str] = ()
    """Settings that may change when an interrupted run resumes."""
    on_progress: Callable[[int, int], None]
    """Called with the corpus bytes done and the total."""
    on_skip: Callable[[str], None]
    """Called with location and reason for every unreadable document."""
    shard: ArrayShard | None = None
    """This job's part of an array job."""

    def finished(self, out: str | Path) -> SummaryT | None:
        """Return the summary if `out` holds this finished run already.

        Raises:
            OutputError: `out` holds something else.
        """
        with writing(Path(out)):
            return self.output.finished(Path(os.path.realpath(out)), out)

    def publish(self, out: str | Path) -> SummaryT:
        """Run or resume in `OUT.partial`, then rename that folder to `out`.

        Raises:
            CorpusError: the corpus holds no documents, or a file is damaged.
            OutputError: `out` cannot be written, or holds something else.
        """
        if (finished := self.finished(out)) is not None:
            return finished
        # A job of an array writes results, not OUT.
        if self.shard is not None and not self.shard.merges:
            return self._run_job(self.shard)
        folder = resolve_output(out)
        for path in [self.corpus] if isinstance(self.corpus, str | Path) else self.corpus:
            check_outside_corpus(folder, path)
        partial = _partial(folder)
        with work_folder(partial, self.files):
            summary = self._run(partial)
            (partial / JOURNAL).unlink(missing_ok=True)
            sync_tree(partial)
            publish(partial, folder)
        return msgspec.structs.replace(summary, folder=str(out))

    def _run(self, folder: Path) -> SummaryT:
        journal = self._load_journal(folder)
        progress = journal.progress if journal else Progress()
        try:
            self.output.open(folder, journal.output if journal else None)
            last_save = time.monotonic()
            batches = read_batches(self.source, progress, self.on_skip)
            with closing(self._results(folder, batches)) as results:
                for read, result in results:
                    self.output.write(read.batch, result)
                    progress = read.progress
                    self.on_progress(read.read_bytes, self.source.size_bytes)
                    if time.monotonic() - last_save >= SAVE_EVERY_S:
                        self._save_journal(folder, progress)
                        last_save = time.monotonic()
            return self.output.finish(progress)
        finally:
            self.output.abandon()

    def _results(self, folder: Path, batches: Iterator[ReadBatch]) -> Results[R]:
        """Process batches, or look up the results of an array job."""
        if self.shard is None:
            yield from self.process(folder, batches)
            return
        stored = StoredResults(self.shard, self._settings_key)
        for read in batches:
            # The last batch may be empty, and no job has stored its result after a resume.
            if read.batch.items:
                yield read, self.work.load(stored.find(self._key(read)))
            else:
                yield read, self.work.empty

    def _run_job(self, shard: ArrayShard) -> SummaryT:
        """Process this job's batches of an array job."""
        file = shard.path()
        if not (done_before := file.exists()):
            with shard.writing(self._settings_key) as writer:
                # All jobs read the same batches, and each processes its share of them.
                batches = (
                    read
                    for number, read in enumerate(
                        read_batches(self.source, Progress(), self.on_skip)
                    )
                    if writer.should_run(number, self._key(read))
                )
                with closing(self.process(shard.folder, batches)) as results:
                    for read, result in results:
                        writer.add(self._key(read), self.work.dump(read.batch, result))
                        self.on_progress(read.read_bytes, self.source.size_bytes)
        contents = (content for _, _, content in read_results(file, self._settings_key))
        return self.output.summarize(file, contents, done_before)

    def _key(self, read: ReadBatch) -> bytes:
        return request_key(self.work.request(read.batch))

    @property
    def _settings_key(self) -> bytes:
        return request_key(msgspec.json.encode([self.command, self.recipe]))

    def _load_journal(self, folder: Path) -> Journal[StateT] | None:
        journal = load_journal(folder, self.journal)
        if journal is None:
            return None
        changes = differences(journal.recipe, self.recipe, ignored=self.may_change)
        if journal.command != self.command:
            changes = [
                f"it was written by `ms-data {journal.command}`, not `ms-data {self.command}`"
            ]
        if self.source.files_digest(journal.progress.position.file + 1) != journal.files_read:
            changes.append("the corpus has different files or content")
        if changes:
            raise OutputError(
                f"{folder} holds an interrupted {self.noun} with different settings: "
                f"{'; '.join(changes)}; use the same settings, or remove the folder"
            )
        return journal

    def _save_journal(self, folder: Path, progress: Progress) -> None:
        # `save` syncs the output first, so the journal never counts bytes that can be lost.
        journal = Journal(
            command=self.command,
            recipe=dict(self.recipe),
            progress=progress,
            files_read=self.source.files_digest(progress.position.file + 1),
            output=self.output.save(),
        )
        save_journal(folder, journal)

    def discard(self, out: str | Path) -> None:
        """Forget the progress of an interrupted run, so that the next one starts over."""
        if self.shard is not None and not self.shard.merges:
            self.shard.remove_partial()
        else:
            (_partial(Path(os.path.realpath(out))) / JOURNAL).unlink(missing_ok=True)


def _partial(folder: Path) -> Path:
    return folder.with_name(folder.name + ".partial")
