"""Runs a pass over a corpus: batches to processes, their answers to files, in one fixed order.

It works in `OUT.partial` beside the folder asked for, which takes that name when all is synced.
Every few seconds it syncs what it wrote and notes how far it is; the same command after a crash
goes on from there and ends in the same bytes.
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
    free_place,
    load_journal,
    refuse_inside,
    save_journal,
    work_folder,
)
from ms_data.passes.array_jobs import Answers, ArrayShard, answers_in, key_of
from ms_data.passes.batches import PassProgress, ReadBatch, read_batches
from ms_data.passes.output import FileEntry, SeriesWriter, entry_of
from ms_data.passes.pool import ordered_answers
from ms_data.passes.record import (
    LEDGER_FILE,
    LedgerSummary,
    PassRecord,
    differences,
    finished,
    save_record,
)
from ms_data.passes.tally import Tally
from ms_data.settings.arguments import check_counts

SAVE_EVERY_S = 5.0
"""A pass that is killed loses at most about this much work."""

WITHOUT_STRICT = "; without --strict it is left out and named"
"""What to do about a document that stops a pass."""

SERIES = ("documents", "ledger")

_OURS = re.compile(
    r"((documents|ledger)(/part-\d{5,}\.jsonl\.zst)?|scratch(\.partial)?(/.*)?|ledger\.json|"
    r"clusters\.jsonl|journal\.msgpack)(\.partial)?"
)
"""All that a pass writes."""


def reading_recipe(source: Corpus, shard_size_mib: int) -> dict[str, Any]:
    """Return the settings of reading and writing that decide the bytes.

    Raises:
        SettingError: the size of a shard is below 1.
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
    """What one process made of a batch."""

    frames: tuple[bytes, bytes]
    """Documents and ledger, each as JSON Lines packed by zstd; empty where there are none."""
    tally: Tally


class PassJournal(msgspec.Struct, frozen=True, kw_only=True, tag="ms-data.pass.2"):
    """The state of a pass at a moment when all that it counts is safely on disk."""

    kind: str
    recipe: dict[str, Any]
    progress: PassProgress
    files_read: str
    """Names, sizes and times of the files that were read so far, as a checksum."""
    series: dict[str, tuple[FileEntry, ...]]
    tally: Tally


@frozen(kw_only=True)
class Pass:
    """A pass to run."""

    kind: str
    """The command, such as `clean`."""
    source: Corpus
    recipe: Mapping[str, Any]
    """All that decides the bytes, apart from the corpus, as JSON values."""
    work: str
    """`module:function`; it takes `setup` and returns the function that turns the JSON of a `Batch`
    into that of a `PassResult`."""
    workers: int | str
    """Processes, or a Ray cluster."""
    shard_size_mib: int
    on_progress: Callable[[int, int], None]
    """Called with the bytes of the corpus that are done, and all."""
    on_quarantine: Callable[[str], None]
    """Called with the place and the fault of each document that cannot be read."""
    prepare: Callable[[Path], bytes]
    """Returns `setup`, once a folder to work in is held."""
    corpus: CorpusName
    """What the user typed."""
    scratch: str = ""
    """A folder inside the work folder that `prepare` fills; it is not kept."""
    extra: tuple[str, ...] = ()
    """Files beside those of a pass that `prepare` writes."""
    shard: ArrayShard | None = None
    """What this job does, where an array of jobs works on the pass."""

    def finished(self, out: str | Path) -> LedgerSummary | None:
        """Return the summary of the same pass, if it is in `out` already.

        Raises:
            OutputError: something else is there.
        """
        check_path("out", out, error=OutputError, written="folder")
        with writing(Path(out)):
            folder = Path(os.path.realpath(out))
            return finished(folder, self.kind, dict(self.recipe), self.source, out)

    def publish(self, out: str | Path) -> LedgerSummary:
        """Run the pass, or what is left of it, and give the folder its name.

        Raises:
            CorpusError: the corpus holds no document, or a file is damaged.
            OutputError: `out` cannot be written, or holds something else.
        """
        if (done := self.finished(out)) is not None:
            return done
        if self.shard is not None and self.shard.number:
            return self._answer(self.shard)
        folder = free_place(out)
        for one in [self.corpus] if isinstance(self.corpus, str | Path) else self.corpus:
            refuse_inside(folder, one)
        aside = folder.with_name(folder.name + ".partial")
        with work_folder(aside, _OURS):
            record = self._run(aside)
            save_record(aside, record)
            if self.scratch:
                gone = aside / f"{self.scratch}.partial"
                (aside / self.scratch).rename(gone)  # no half of it is taken for the whole
                shutil.rmtree(gone)
            (aside / JOURNAL).unlink(missing_ok=True)
            sync_tree(aside)
            publish(aside, folder)
        return record.summary(out)

    def _answer(self, shard: ArrayShard) -> LedgerSummary:
        """Work on the batches of one job of an array."""
        path, tally = shard.path(), Tally()
        if not (done := path.exists()):
            with shard.writing(self._identity) as writer:
                read = enumerate(read_batches(self.source, PassProgress(), lambda reason: None))
                requests = ((n, one, msgspec.msgpack.encode(one.batch)) for n, one in read)
                asked = (
                    ((one, key), request)
                    for n, one, request in requests
                    if writer.wants(n, key := key_of(request))
                )
                setup = self.prepare(shard.folder)
                answers = ordered_answers(self.work, setup, asked, workers=self.workers)
                with closing(answers):
                    for (one, key), content in answers:
                        writer.add(key, content)
                        self.on_progress(one.read_bytes, self.source.size_bytes)
        with path.open("rb") as file:
            for _, begin, size in answers_in(path, self._identity):
                file.seek(begin)
                tally.merge(msgspec.msgpack.decode(file.read(size), type=PassResult).tally)
        summary = LedgerSummary.of(str(path), tally, {}, path.stat().st_size)
        return msgspec.structs.replace(summary, done_before=done)

    @property
    def _identity(self) -> bytes:
        return key_of(msgspec.json.encode([self.kind, self.recipe]))

    def _answers(
        self, setup: bytes, asked: Iterator[tuple[ReadBatch, bytes]]
    ) -> Generator[tuple[ReadBatch, bytes], None, None]:
        """Work on batches, or look up what an array of jobs made of them."""
        if self.shard is None:
            yield from ordered_answers(self.work, setup, asked, workers=self.workers)
            return
        made = Answers(self.shard, self._identity)
        # Nobody was asked for the nothing that follows a saved last batch.
        nothing = msgspec.msgpack.encode(PassResult((b"", b""), Tally()))
        for read, request in asked:
            yield read, made.find(key_of(request)) if read.batch.items else nothing

    def _run(self, folder: Path) -> PassRecord:
        journal = self._journal(folder)
        _clear(folder, journal.series if journal else {})
        setup = self.prepare(folder)
        tally = journal.tally if journal else Tally()
        progress = journal.progress if journal else PassProgress()
        writers: dict[str, SeriesWriter] = {}
        saved = time.monotonic()
        unreadable, fault = 0, ""

        def quarantine(reason: str) -> None:
            nonlocal unreadable, fault
            unreadable, fault = unreadable + 1, fault or reason
            self.on_quarantine(reason)

        asked = (
            (one, msgspec.msgpack.encode(one.batch))
            for one in read_batches(self.source, progress, quarantine)
        )
        try:
            for name in SERIES:
                entries = journal.series[name] if journal else ()
                size = self.shard_size_mib << 20
                writers[name] = SeriesWriter(folder, name, shard_size_bytes=size, entries=entries)
            with closing(self._answers(setup, asked)) as answers:
                for read, content in answers:
                    answer = msgspec.msgpack.decode(content, type=PassResult)
                    for writer, frame in zip(writers.values(), answer.frames, strict=True):
                        writer.write(frame)
                    tally.merge(answer.tally)
                    progress = read.progress
                    self.on_progress(read.read_bytes, self.source.size_bytes)
                    if time.monotonic() - saved >= SAVE_EVERY_S:
                        self._save(folder, progress, writers, tally)
                        saved = time.monotonic()
            if not tally.documents:
                raise CorpusError(f"{self.source.name} is empty: it holds no document; give text")
            if unreadable == tally.documents:
                raise CorpusError(f"no document of {self.source.name} can be read: {fault}")
            return self._record(folder, progress, writers, tally)
        finally:
            for writer in writers.values():
                writer.abandon()

    def _journal(self, folder: Path) -> PassJournal | None:
        journal = load_journal(folder, PassJournal)
        if journal is None:
            return None
        differing = differences(journal.kind, journal.recipe, self.kind, dict(self.recipe))
        if self.source.identity(journal.progress.position.file + 1) != journal.files_read:
            differing.append("the corpus has other files, or other content")
        if differing:
            raise OutputError(
                f"{folder} holds interrupted work that cannot go on with other settings: "
                f"{'; '.join(differing)}; give those it had, or remove the folder"
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
            kind=self.kind,
            recipe=dict(self.recipe),
            progress=progress,
            files_read=self.source.identity(progress.position.file + 1),
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
            kind=self.kind,
            recipe=dict(self.recipe),
            listing=self.source.listing,
            content=self.source.content(),
            tally=tally,
            left_out=progress.left_out,
            empty=progress.empty,
            files=(*written, *(entry_of(folder, name) for name in self.extra)),
        )


def _clear(folder: Path, kept: Mapping[str, tuple[FileEntry, ...]]) -> None:
    """Remove what an earlier run wrote after its last save."""
    names = {entry.name for entries in kept.values() for entry in entries} | {JOURNAL}
    for series in SERIES:
        for path in (folder / series).glob("*"):
            if str(path.relative_to(folder)) not in names:
                path.unlink()
    for path in (folder / LEDGER_FILE, *folder.glob("*.partial")):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
