"""Output of `clean` and `dedup`: the kept documents and a ledger, as series of compressed files."""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zstandard
from attrs import define, field

from ms_data.corpus.corpus import Corpus
from ms_data.corpus.find import CorpusName
from ms_data.disk.format import encode_sealed
from ms_data.engine.array_jobs import ArrayShard
from ms_data.engine.batches import DocumentBatch, Progress
from ms_data.engine.pools import Work, map_workers
from ms_data.engine.run import Journal, Run
from ms_data.errors import CorpusError
from ms_data.files.durable import write_file
from ms_data.files.work_folder import JOURNAL
from ms_data.ledger.record import LEDGER_FILE, LedgerRecord, LedgerSummary, finished_summary
from ms_data.ledger.series import FileEntry, SeriesWriter, file_entry
from ms_data.ledger.tally import Tally
from ms_data.settings.arguments import check_counts

WITHOUT_STRICT = "; without --strict it is skipped and reported"
"""Remedy for a document that stops a run."""

LEVEL = 3
"""zstd compression level."""

_SERIES = ("documents", "ledger")

_FILES = re.compile(
    r"((documents|ledger)(/part-\d{5,}\.jsonl\.zst)?|scratch(\.partial)?(/.*)?|ledger\.json|"
    r"clusters\.jsonl|journal\.msgpack)(\.partial)?"
)
"""Names of all files that a run writes."""


class BatchResult(msgspec.Struct, frozen=True, array_like=True):
    """Output of a worker process for one batch."""

    frames: tuple[bytes, bytes]
    """Documents and ledger entries, each a zstd frame of JSON Lines, or empty."""
    tally: Tally


class LedgerState(msgspec.Struct, frozen=True, kw_only=True):
    """Files and totals of an unfinished run."""

    series: dict[str, tuple[FileEntry, ...]]
    tally: Tally


LedgerRun = Run[bytes, LedgerState, LedgerSummary]


def ledger_run(
    command: str,
    corpus: CorpusName,
    source: Corpus,
    *,
    recipe: Mapping[str, Any],
    function: str,
    setup: Callable[[Path], bytes],
    workers: int | str,
    shard_size_mib: int,
    on_progress: Callable[[int, int], None],
    on_skip: Callable[[str], None],
    shard: ArrayShard | None = None,
    scratch: str = "",
    extra: tuple[str, ...] = (),
) -> LedgerRun:
    """Return a run that writes documents and a ledger; see `Run` for most arguments.

    `function` and `setup` define the work of a worker: `function`, a `module:function`, is called
    with the result of `setup` for the work folder, and returns the function that converts an
    encoded `DocumentBatch` to an encoded `BatchResult`. `setup` may fill the temporary folder
    `scratch` in the work folder, and write the additional output files `extra`. `workers` is a
    number of processes, or the address of a Ray cluster; an output file is closed after the MiB of
    text that brings its compressed size above `shard_size_mib`.
    """
    work = Work(
        function=function,
        request=msgspec.msgpack.encode,
        dump=lambda batch, result: result,
        load=bytes,
        empty=msgspec.msgpack.encode(BatchResult((b"", b""), Tally())),
    )
    return Run(
        command=command,
        corpus=corpus,
        source=source,
        recipe=recipe,
        work=work,
        process=lambda folder, batches: map_workers(work, setup(folder), batches, workers=workers),
        output=LedgerOutput(
            command=command,
            source=source,
            recipe=recipe,
            shard_size_bytes=shard_size_mib << 20,
            scratch=scratch,
            extra=extra,
        ),
        journal=Journal[LedgerState],
        files=_FILES,
        noun="run",
        on_progress=on_progress,
        # The merge reports files that array jobs cannot read.
        on_skip=on_skip if shard is None or shard.merges else lambda reason: None,
        shard=shard,
    )


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


@define(kw_only=True)
class LedgerOutput:
    """Writes the results of batches to `documents` and `ledger`, and the record `ledger.json`."""

    command: str
    source: Corpus
    recipe: Mapping[str, Any]
    shard_size_bytes: int
    scratch: str
    extra: tuple[str, ...]
    _folder: Path = field(init=False)
    _writers: dict[str, SeriesWriter] = field(init=False, factory=dict)
    _tally: Tally = field(init=False, factory=Tally)
    _unreadable: list[str] = field(init=False, factory=list)

    def finished(self, folder: Path, out: str | Path) -> LedgerSummary | None:  # noqa: D102
        return finished_summary(folder, self.command, self.recipe, self.source, out)

    def open(self, folder: Path, state: LedgerState | None) -> None:  # noqa: D102
        series = state.series if state else {}
        saved = {entry.name for entries in series.values() for entry in entries} | {JOURNAL}
        for path in (path for name in _SERIES for path in (folder / name).glob("*")):
            if str(path.relative_to(folder)) not in saved:
                path.unlink()
        for path in (folder / LEDGER_FILE, *folder.glob("*.partial")):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        self._folder = folder
        if state:
            self._tally = state.tally
        for name in _SERIES:
            self._writers[name] = SeriesWriter(
                folder,
                name,
                shard_size_bytes=self.shard_size_bytes,
                entries=series.get(name, ()),
            )

    def write(self, batch: DocumentBatch, result: bytes) -> None:  # noqa: D102
        batch_result = msgspec.msgpack.decode(result, type=BatchResult)
        for writer, frame in zip(self._writers.values(), batch_result.frames, strict=True):
            writer.write(frame)
        self._tally.merge(batch_result.tally)
        self._unreadable += [item.location for item in batch.items if item.text is None]

    def save(self) -> LedgerState:  # noqa: D102
        return LedgerState(
            series={name: writer.sync() for name, writer in self._writers.items()},
            tally=self._tally,
        )

    def finish(self, progress: Progress) -> LedgerSummary:
        """Write the record, and remove the scratch folder.

        Raises:
            CorpusError: the corpus has no readable document.
        """
        if not self._tally.documents:
            raise CorpusError(
                f"{self.source.name} is empty: it holds no documents; use a corpus with text"
            )
        if len(self._unreadable) == self._tally.documents:  # most likely a wrong column or format
            raise CorpusError(
                f"no document of {self.source.name} can be read: {self._unreadable[0]}"
            )
        faults = self._tally.faults()
        assert not faults, faults
        written = [entry for writer in self._writers.values() for entry in writer.finish()]
        record = LedgerRecord(
            kind=self.command,
            recipe=dict(self.recipe),
            listing=self.source.listing_digest,
            content=self.source.content_digest(),
            tally=self._tally,
            left_out=progress.left_out,
            empty=progress.empty,
            files=(*written, *(file_entry(self._folder, name) for name in self.extra)),
        )
        write_file(self._folder / LEDGER_FILE, encode_sealed(record, "checksum"))
        if self.scratch:
            old_scratch = self._folder / f"{self.scratch}.partial"
            # Rename first: a partly deleted folder must not look like a complete one.
            (self._folder / self.scratch).rename(old_scratch)
            shutil.rmtree(old_scratch)
        return record.summary("")

    def abandon(self) -> None:  # noqa: D102
        for writer in self._writers.values():
            writer.abandon()

    def summarize(  # noqa: D102
        self, file: Path, results: Iterable[bytes], done_before: bool
    ) -> LedgerSummary:
        tally = Tally()
        for content in results:
            tally.merge(msgspec.msgpack.decode(content, type=BatchResult).tally)
        summary = LedgerSummary.of(str(file), tally, {}, file.stat().st_size)
        return msgspec.structs.replace(summary, done_before=done_before)


def document_line(text: str, location: str, columns: bytes) -> bytes:
    """Encode a kept document as JSON with `text`, `id` and the other columns of its row.

    `id` is the file name in the corpus and the document number in the file. A row's own `text` and
    `id` columns become `source_text` and `source_id`, unless these exist already.
    """
    line: dict[str, Any] = {"text": text, "id": location}
    if columns:
        columns_dict: dict[str, Any] = json.loads(columns)
        for name in line:
            if name in columns_dict:
                columns_dict.setdefault(f"source_{name}", columns_dict.pop(name))
        return json.dumps(line | columns_dict, ensure_ascii=False, separators=(",", ":")).encode()
    return msgspec.json.encode(line)


def compress_lines(lines: Sequence[bytes]) -> bytes:
    """Compress lines to one zstd frame; empty without lines."""
    if not lines:
        return b""
    return zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).compress(
        b"\n".join((*lines, b""))
    )
