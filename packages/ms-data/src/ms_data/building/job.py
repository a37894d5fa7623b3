"""Runs a build: reads documents, tokenizes on all cores, assigns splits, and writes shards."""

import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash
from attrs import frozen

from ms_data.building.answers import EncodedBatch, pack_batch, unpack_batch
from ms_data.building.encoders import Encoded, TextEncoder
from ms_data.building.endings import EndCounter
from ms_data.building.journal import AnswerCounts, BuildJournal, BuildProgress, Recipe
from ms_data.building.record import Summary
from ms_data.corpus.corpus import Corpus, Document, Position
from ms_data.corpus.file_kinds import omissions
from ms_data.disk.format import (
    DOCUMENT_KINDS,
    FRAME_BYTES,
    MEDIA_SUFFIX,
    Index,
    ShardEntry,
    TokenType,
    encode_index,
    token_type_for,
)
from ms_data.disk.media import set_media_span
from ms_data.disk.writer import DatasetWriter
from ms_data.errors import CorpusError
from ms_data.files.durable import write_file
from ms_data.files.work_folder import JOURNAL, load_journal, save_journal
from ms_data.passes.array_jobs import ArrayShard, StoredResults, read_results, request_key
from ms_data.passes.ray_cluster import map_on_ray

BATCH_CHARACTERS = 1 << 20
"""Text tokenized at a time; the `tokenizers` library uses about 150 MB for it."""

SAVE_EVERY_S = 5.0
"""Seconds between saves of the journal, about the work lost when a build is killed."""

_EncodedDocs = Sequence[Encoded]


class _Batch(NamedTuple):
    """Documents that are tokenized together."""

    documents: list[Document]
    characters: int
    """Total length of the documents."""
    progress: BuildProgress
    """Progress after these documents."""
    read_bytes: int
    """Corpus bytes read up to the end of the batch."""


@frozen
class Job:
    """A build to run."""

    source: Corpus
    encoder: TextEncoder
    recipe: Recipe
    on_progress: Callable[[int, int], None]
    """Called with the corpus bytes done and the total."""
    on_skip: Callable[[str], None] = lambda reason: None
    """Called with location and reason for every skipped document."""
    shard: ArrayShard | None = None
    """This job's part of an array job."""
    cluster: str = ""
    """Address of the Ray cluster; empty for local tokenization."""

    def run_shard(self) -> Summary:
        """Tokenize this job's batches of an array job.

        Raises:
            OutputError: another process is doing the same part, or the file cannot be written.
        """
        assert self.shard is not None
        path = self.shard.path()
        if not (already_done := path.exists()):
            # All jobs read the corpus in the same batches; each encodes its share of them.
            with self.shard.writing(self._settings_key) as writer:
                batches = (
                    batch
                    for index, batch in enumerate(
                        _read_batches(self.source, BuildProgress(), self.on_skip)
                    )
                    if writer.wants(index, _key(batch))
                )
                with closing(_encode_ahead(batches, self.encoder)) as encoded:
                    for batch, words in encoded:
                        writer.add(_key(batch), pack_batch(_texts(batch), words))
                        self.on_progress(batch.read_bytes, self.source.size_bytes)
        sizes: list[int] = []
        text_bytes = 0
        with path.open("rb") as file:
            for _, offset, size in read_results(path, self._settings_key):
                file.seek(offset)
                encoded_batch = msgspec.msgpack.decode(file.read(size), type=EncodedBatch)
                sizes += encoded_batch.sizes
                text_bytes += encoded_batch.text_bytes
        return Summary(
            folder=str(path),
            documents=len(sizes),
            tokens=sum(sizes),
            shards=0,
            size_bytes=path.stat().st_size,
            text_bytes=text_bytes,
            skipped=0,
            left_out={},
            splits={},
            encoder=self.encoder.method,
            built_before=already_done,
        )

    @property
    def _settings_key(self) -> bytes:
        return request_key(msgspec.json.encode(["build", self.recipe]))

    def _encode_batches(
        self, batches: Iterable[_Batch]
    ) -> Generator[tuple[_Batch, _EncodedDocs], None, None]:
        """Tokenize batches locally or on a cluster, or look up the results of an array job."""
        if self.shard is None and self.cluster:
            requests = ((batch, msgspec.msgpack.encode(_texts(batch))) for batch in batches)
            work, setup = "ms_data.building.elsewhere:prepare", self.encoder.setup()
            for batch, result in map_on_ray(work, setup, requests, address=self.cluster):
                yield batch, unpack_batch(result)
            return
        if self.shard is None:
            yield from _encode_ahead(batches, self.encoder)
            return
        stored = StoredResults(self.shard, self._settings_key)
        for batch in batches:
            # The last batch may be empty, and array jobs do not store empty batches.
            yield batch, unpack_batch(stored.find(_key(batch))) if batch.documents else []

    def run(self, folder: Path) -> Summary:
        """Build the dataset in `folder`, resuming from an existing journal.

        Raises:
            CorpusError: the corpus holds no text, or an unreadable document.
            OutputError: `folder` holds another interrupted build, or cannot be written.
        """
        journal = load_journal(folder, BuildJournal)
        if journal is not None:
            journal.check(self.recipe, self.source, folder)
        # Resume from the journal: remove newer files, reopen shards, continue at its position.
        _remove_unsaved(folder, set(journal.dataset.names) if journal else set())
        progress = journal.progress if journal else BuildProgress()
        writer = DatasetWriter(
            folder,
            token_type=self._token_type,
            frame_tokens=self._frame_tokens,
            shard_size_bytes=self.recipe.shard_size_bytes,
            state=journal.dataset if journal else None,
        )
        try:
            last_save = time.monotonic()
            batches = _read_batches(self.source, progress, self.on_skip)
            with closing(self._encode_batches(batches)) as encoded:
                for batch, words in encoded:
                    self._write(writer, batch, words)
                    answers = self._count(words, progress.answers)
                    progress = msgspec.structs.replace(batch.progress, answers=answers)
                    # A save syncs the shards first, so the journal never counts bytes that can be
                    # lost.
                    if time.monotonic() - last_save >= SAVE_EVERY_S:
                        self._save(folder, progress, writer)
                        last_save = time.monotonic()
            return self._finish(folder, writer.close(), progress)
        finally:
            writer.abandon()

    @property
    def _token_type(self) -> TokenType:
        return token_type_for(self.encoder.tokenizer.vocabulary_size, self.encoder.document_kind)

    @property
    def _frame_tokens(self) -> int:
        return FRAME_BYTES // (2 if self._token_type == "uint16" else 4)

    def _write(self, writer: DatasetWriter, batch: _Batch, encoded: _EncodedDocs) -> None:
        for document, (words, media) in zip(batch.documents, encoded, strict=True):
            split = "held_out" if self._is_held_out(document.text) else "train"
            if media is not None:
                media_split = split + MEDIA_SUFFIX
                words = set_media_span(words, writer.tokens(media_split), len(media))
                writer.append(media_split, media)
            writer.append(split, words)
        self.on_progress(batch.read_bytes, self.source.size_bytes)

    def _count(self, encoded: _EncodedDocs, answers: AnswerCounts) -> AnswerCounts:
        """Add the answers of a batch to `answers`."""
        if self.encoder.document_kind == "text":
            return answers
        counter = EndCounter(
            self.encoder.tokenizer, DOCUMENT_KINDS[self.encoder.document_kind].header_words
        )
        for words, _ in encoded:
            answers = answers.plus(counter.count(words))
        return answers

    def _is_held_out(self, text: str) -> bool:
        if not self.recipe.hold_out:
            return False
        key = self.encoder.hold_out_key(text).encode()
        # The choice depends on the text only, so duplicates end up in the same split.
        return xxhash.xxh3_64_intdigest(key) < self.recipe.hold_out * 2.0**64

    def _save(self, folder: Path, progress: BuildProgress, writer: DatasetWriter) -> None:
        journal = BuildJournal(
            recipe=self.recipe,
            progress=progress,
            files_read=self.source.files_digest(progress.position.file + 1),
            dataset=writer.state(),
        )
        save_journal(folder, journal)

    def _finish(
        self, folder: Path, shards: tuple[ShardEntry, ...], progress: BuildProgress
    ) -> Summary:
        if not shards:
            missing = omissions(progress.left_out, progress.skipped, progress.empty)
            raise CorpusError(
                f"{self.source.name} is empty: no text in {len(self.source.files)} files{missing}; "
                "use a corpus with text"
            )
        tokenizer, files = self.encoder.tokenizer, self.encoder.files()
        for name, content in {"tokenizer.json": tokenizer.content, **files}.items():
            write_file(folder / name, content)
        chat = xxhash.xxh3_128_hexdigest(b"".join(files.values()))
        index = Index(
            token_type=self._token_type,
            frame_tokens=self._frame_tokens,
            vocabulary_size=tokenizer.vocabulary_size,
            end_of_text=tokenizer.end_of_text,
            tokenizer=tokenizer.digest,
            hold_out=self.recipe.hold_out,
            shards=shards,
            kind=self.encoder.document_kind if files else msgspec.UNSET,
            chat=chat if files else msgspec.UNSET,
        )
        write_file(folder / "index.json", encode_index(index))
        return Summary.of(shards, progress, self.recipe, self.encoder)


def _key(batch: _Batch) -> bytes:
    return request_key(msgspec.msgpack.encode(_texts(batch)))


def _texts(batch: _Batch) -> list[str]:
    return [document.text for document in batch.documents]


def _encode_ahead(
    batches: Iterable[_Batch], encoder: TextEncoder
) -> Generator[tuple[_Batch, _EncodedDocs], None, None]:
    """Yield encoded batches in order, while later batches are tokenized in the background."""
    queue: deque[tuple[_Batch, Future[_EncodedDocs]]] = deque()
    max_ahead = encoder.batches_ahead
    pool = ThreadPoolExecutor(max_ahead)
    try:
        for batch in batches:
            queue.append((batch, pool.submit(encoder.encode, _texts(batch))))
            # A batch may be one long document that takes more memory than all others together.
            while len(queue) > max_ahead or (
                len(queue) > 1
                and sum(queued.characters for queued, _ in queue)
                > (max_ahead + 2) * BATCH_CHARACTERS
            ):
                first, encoded = queue.popleft()
                yield first, encoded.result()
        for first, encoded in queue:
            yield first, encoded.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _read_batches(
    source: Corpus, start: BuildProgress, report_skip: Callable[[str], None]
) -> Iterator[_Batch]:
    """Yield the documents after `start` in batches of about `BATCH_CHARACTERS`."""
    documents: list[Document] = []
    size, text_bytes = 0, start.text_bytes
    skipped, empty, left_out = start.skipped, start.empty, Counter(start.left_out)

    def batch(position: Position, read_bytes: int) -> _Batch:
        progress = BuildProgress(
            position=position,
            text_bytes=text_bytes,
            skipped=skipped,
            empty=empty,
            left_out=dict(sorted(left_out.items())),
        )
        return _Batch(documents, size, progress, read_bytes)

    def on_skip(reason: str) -> None:
        nonlocal skipped
        skipped += 1
        report_skip(reason)

    def on_leave_out(file_type: str) -> None:
        left_out[file_type] += 1

    def on_empty() -> None:
        nonlocal empty
        empty += 1

    for document in source.documents(start.position, on_skip, on_leave_out, on_empty):
        documents.append(document)
        size += len(document.text)
        text_bytes += len(document.text.encode())
        if size >= BATCH_CHARACTERS:
            yield batch(document.after, document.read_bytes)
            documents, size = [], 0
    yield batch(Position(len(source.files)), source.size_bytes)


def _remove_unsaved(folder: Path, saved_names: set[str]) -> None:
    """Remove files that an earlier run wrote after its last save."""
    for path in folder.iterdir():
        if path.name not in saved_names and path.name != JOURNAL:
            path.unlink()
