"""Runs a build: reads, tokenizes on all cores, assigns splits, compresses, saves as it goes."""

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

from ms_data.building.answers import EncodedBatch, packed, unpacked
from ms_data.building.encoders import Encoded, TextEncoder
from ms_data.building.endings import EndCounter
from ms_data.building.journal import AnswerCounts, BuildJournal, BuildProgress, Recipe
from ms_data.building.record import Summary
from ms_data.corpus.corpus import Corpus, Document, Position
from ms_data.corpus.file_kinds import omissions
from ms_data.disk.format import (
    FRAME_BYTES,
    KINDS,
    MEDIA_SUFFIX,
    Index,
    ShardEntry,
    TokenType,
    encode_index,
    token_type_for,
)
from ms_data.disk.media import place_media
from ms_data.disk.writer import DatasetWriter
from ms_data.errors import CorpusError
from ms_data.files.durable import write_file
from ms_data.files.work_folder import JOURNAL, load_journal, save_journal
from ms_data.passes.array_jobs import Answers, ArrayShard, answers_in, key_of
from ms_data.passes.ray_cluster import answers_on_ray

BATCH_CHARACTERS = 1 << 20
"""Text that is tokenized at once; where the library does, it takes some 150 MB."""

SAVE_EVERY_S = 5.0
"""A build that is killed loses at most about this much work."""

_Encoded = Sequence[Encoded]


class _Batch(NamedTuple):
    """Documents that are tokenized together."""

    documents: list[Document]
    characters: int
    """Length of all documents."""
    progress: BuildProgress
    """How much of the corpus is done once these are."""
    read_bytes: int
    """Bytes of the corpus read by then."""


@frozen
class Job:
    """A build to run."""

    source: Corpus
    encoder: TextEncoder
    recipe: Recipe
    on_progress: Callable[[int, int], None]
    """Called with the bytes of the corpus that are done, and all."""
    on_skip: Callable[[str], None] = lambda reason: None
    """Called with the place and the fault of each document that is left out."""
    shard: ArrayShard | None = None
    """What this job does, where an array of jobs tokenizes."""
    cluster: str = ""
    """The address of the Ray cluster, where one tokenizes."""

    def run_shard(self) -> Summary:
        """Tokenize the batches of one job of an array.

        Raises:
            OutputError: another process works on them, or the file cannot be written.
        """
        assert self.shard is not None
        path = self.shard.path()
        if not (done := path.exists()):
            with self.shard.writing(self._identity) as writer:
                batches = (
                    batch
                    for n, batch in enumerate(
                        _read_batches(self.source, BuildProgress(), self.on_skip)
                    )
                    if writer.wants(n, _key(batch))
                )
                with closing(_encode_ahead(batches, self.encoder)) as encoded:
                    for batch, found in encoded:
                        writer.add(_key(batch), packed(_texts(batch), found))
                        self.on_progress(batch.read_bytes, self.source.size_bytes)
        sizes: list[int] = []
        text_bytes = 0
        with path.open("rb") as file:
            for _, begin, size in answers_in(path, self._identity):
                file.seek(begin)
                answer = msgspec.msgpack.decode(file.read(size), type=EncodedBatch)
                sizes += answer.sizes
                text_bytes += answer.text_bytes
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
            built_before=done,
        )

    @property
    def _identity(self) -> bytes:
        return key_of(msgspec.json.encode(["build", self.recipe]))

    def _encoded(self, batches: Iterable[_Batch]) -> Generator[tuple[_Batch, _Encoded], None, None]:
        """Tokenize batches, here or on a cluster, or look up what an array of jobs made."""
        if self.shard is None and self.cluster:
            asked = ((batch, msgspec.msgpack.encode(_texts(batch))) for batch in batches)
            work, setup = "ms_data.building.elsewhere:prepare", self.encoder.setup()
            for batch, answer in answers_on_ray(work, setup, asked, address=self.cluster):
                yield batch, unpacked(answer)
            return
        if self.shard is None:
            yield from _encode_ahead(batches, self.encoder)
            return
        made = Answers(self.shard, self._identity)
        for batch in batches:
            # Nobody was asked for the nothing that follows a saved last batch.
            yield batch, unpacked(made.find(_key(batch))) if batch.documents else []

    def run(self, folder: Path) -> Summary:
        """Write what `folder` does not hold yet.

        Raises:
            CorpusError: the corpus holds no text, or something that cannot be read.
            OutputError: another build was interrupted in the folder, or it cannot be written.
        """
        journal = load_journal(folder, BuildJournal)
        if journal is not None:
            journal.check(self.recipe, self.source, folder)
        _clear(folder, set(journal.dataset.names) if journal else set())
        progress = journal.progress if journal else BuildProgress()
        writer = DatasetWriter(
            folder,
            token_type=self._token_type,
            frame_tokens=self._frame_tokens,
            shard_size_bytes=self.recipe.shard_size_bytes,
            state=journal.dataset if journal else None,
        )
        try:
            saved = time.monotonic()
            batches = _read_batches(self.source, progress, self.on_skip)
            with closing(self._encoded(batches)) as encoded:
                for batch, found in encoded:
                    self._write(writer, batch, found)
                    answers = self._count(found, progress.answers)
                    progress = msgspec.structs.replace(batch.progress, answers=answers)
                    if time.monotonic() - saved >= SAVE_EVERY_S:
                        self._save(folder, progress, writer)
                        saved = time.monotonic()
            return self._finish(folder, writer.close(), progress)
        finally:
            writer.abandon()

    @property
    def _token_type(self) -> TokenType:
        return token_type_for(self.encoder.tokenizer.vocabulary_size, self.encoder.kind)

    @property
    def _frame_tokens(self) -> int:
        return FRAME_BYTES // (2 if self._token_type == "uint16" else 4)

    def _write(self, writer: DatasetWriter, batch: _Batch, encoded: _Encoded) -> None:
        for document, (words, media) in zip(batch.documents, encoded, strict=True):
            split = "held_out" if self._is_held_out(document.text) else "train"
            if media is not None:
                beside = split + MEDIA_SUFFIX
                words = place_media(words, writer.tokens(beside), len(media))
                writer.append(beside, media)
            writer.append(split, words)
        self.on_progress(batch.read_bytes, self.source.size_bytes)

    def _count(self, encoded: _Encoded, answers: AnswerCounts) -> AnswerCounts:
        """Add the answers of a batch to those before it."""
        if self.encoder.kind == "text":
            return answers
        counter = EndCounter(self.encoder.tokenizer, KINDS[self.encoder.kind].header_words)
        for words, _ in encoded:
            answers = answers.plus(counter.count(words))
        return answers

    def _is_held_out(self, text: str) -> bool:
        if not self.recipe.hold_out:
            return False
        key = self.encoder.hold_out_key(text).encode()
        return xxhash.xxh3_64_intdigest(key) < self.recipe.hold_out * 2.0**64

    def _save(self, folder: Path, progress: BuildProgress, writer: DatasetWriter) -> None:
        journal = BuildJournal(
            recipe=self.recipe,
            progress=progress,
            files_read=self.source.identity(progress.position.file + 1),
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
                "give a corpus that holds text"
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
            kind=self.encoder.kind if files else msgspec.UNSET,
            chat=chat if files else msgspec.UNSET,
        )
        write_file(folder / "index.json", encode_index(index))
        return Summary.of(shards, progress, self.recipe, self.encoder)


def _key(batch: _Batch) -> bytes:
    return key_of(msgspec.msgpack.encode(_texts(batch)))


def _texts(batch: _Batch) -> list[str]:
    return [document.text for document in batch.documents]


def _encode_ahead(
    batches: Iterable[_Batch], encoder: TextEncoder
) -> Generator[tuple[_Batch, _Encoded], None, None]:
    """Yield each batch with its tokens, in order, while the batches after it are tokenized."""
    ahead: deque[tuple[_Batch, Future[_Encoded]]] = deque()
    most = encoder.batches_ahead
    pool = ThreadPoolExecutor(most)
    try:
        for batch in batches:
            ahead.append((batch, pool.submit(encoder.encode, _texts(batch))))
            # A batch may be one long document, whose tokens take more than all others.
            while len(ahead) > most or (
                len(ahead) > 1
                and sum(one.characters for one, _ in ahead) > (most + 2) * BATCH_CHARACTERS
            ):
                first, encoded = ahead.popleft()
                yield first, encoded.result()
        for first, encoded in ahead:
            yield first, encoded.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _read_batches(
    source: Corpus, start: BuildProgress, name_skipped: Callable[[str], None]
) -> Iterator[_Batch]:
    """Yield the documents after `start`, some MB of text at a time."""
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
        name_skipped(reason)

    def on_leave_out(kind: str) -> None:
        left_out[kind] += 1

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


def _clear(folder: Path, kept: set[str]) -> None:
    """Remove what an earlier run wrote after its last save."""
    for path in folder.iterdir():
        if path.name not in kept and path.name != JOURNAL:
            path.unlink()
