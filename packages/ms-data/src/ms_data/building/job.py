"""Runs a build: reads, tokenizes on all cores, assigns splits, compresses, saves as it goes."""

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash
from attrs import frozen
from numpy.typing import NDArray

from ms_data.building.encoders import TextEncoder
from ms_data.building.journal import Journal, Progress, Recipe
from ms_data.building.record import Summary
from ms_data.corpus.corpus import Corpus, Document, Position
from ms_data.corpus.file_kinds import omissions
from ms_data.disk.format import (
    FRAME_BYTES,
    Index,
    ShardEntry,
    TokenType,
    encode_index,
    token_type_for,
)
from ms_data.disk.writer import DatasetWriter
from ms_data.errors import CorpusError
from ms_data.files.durable import write_file
from ms_data.files.work_folder import JOURNAL, load_journal, save_journal

BATCH_CHARACTERS = 1 << 20
"""Text that is tokenized at once; its tokens take some 150 MB until they are written."""

BATCHES_AHEAD = max(2, (os.cpu_count() or 1) // 4)
"""Batches that are tokenized while one is written, so that no core waits for a long document."""

CHARACTERS_AHEAD = (BATCHES_AHEAD + 2) * BATCH_CHARACTERS
"""Text in all these batches; more than that waits, unless it is one document."""

SAVE_EVERY_S = 5.0
"""A build that is killed loses at most about this much work."""

_Encoded = Sequence[NDArray[np.integer]]


class _Batch(NamedTuple):
    """Documents that are tokenized together."""

    documents: list[Document]
    characters: int
    """Length of all documents."""
    progress: Progress
    """What is done of the corpus with them."""
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

    def run(self, folder: Path) -> Summary:
        """Writes what is left to write in `folder`.

        Raises:
            CorpusError: the corpus holds no text, or what cannot be read.
            OutputError: another build was interrupted in the folder, or it cannot be written.
        """
        journal = load_journal(folder, Journal)
        if journal is not None:
            journal.check(self.recipe, self.source, folder)
        _clear(folder, set(journal.dataset.names) if journal else set())
        progress = journal.progress if journal else Progress()
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
            with closing(_encode_ahead(batches, self.encoder.encode)) as encoded:
                for batch, found in encoded:
                    self._write(writer, batch, found)
                    progress = batch.progress
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
        for document, tokens in zip(batch.documents, encoded, strict=True):
            writer.append("held_out" if self._is_held_out(document.text) else "train", tokens)
        self.on_progress(batch.read_bytes, self.source.size_bytes)

    def _is_held_out(self, text: str) -> bool:
        if not self.recipe.hold_out:
            return False
        key = self.encoder.hold_out_key(text).encode()
        return xxhash.xxh3_64_intdigest(key) < self.recipe.hold_out * 2.0**64

    def _save(self, folder: Path, progress: Progress, writer: DatasetWriter) -> None:
        journal = Journal(
            recipe=self.recipe,
            progress=progress,
            files_read=self.source.identity(progress.position.file + 1),
            dataset=writer.state(),
        )
        save_journal(folder, journal)

    def _finish(self, folder: Path, shards: tuple[ShardEntry, ...], progress: Progress) -> Summary:
        if not shards:
            missing = omissions(progress.left_out, progress.skipped)
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
        return Summary.of(shards, progress)


def _encode_ahead(
    batches: Iterable[_Batch], encode: Callable[[list[str]], _Encoded]
) -> Generator[tuple[_Batch, _Encoded], None, None]:
    """Gives each batch with its tokens, in order, while some batches ahead are tokenized."""
    ahead: deque[tuple[_Batch, Future[_Encoded]]] = deque()
    pool = ThreadPoolExecutor(BATCHES_AHEAD)
    try:
        for batch in batches:
            texts = [document.text for document in batch.documents]
            ahead.append((batch, pool.submit(encode, texts)))
            # A batch may be one long document, whose tokens take more than all others.
            while len(ahead) > BATCHES_AHEAD or (
                len(ahead) > 1 and sum(one.characters for one, _ in ahead) > CHARACTERS_AHEAD
            ):
                first, encoded = ahead.popleft()
                yield first, encoded.result()
        for first, encoded in ahead:
            yield first, encoded.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _read_batches(
    source: Corpus, start: Progress, name_skipped: Callable[[str], None]
) -> Iterator[_Batch]:
    """Gives the documents after `start`, some MB of text at a time."""
    documents: list[Document] = []
    size, text_bytes = 0, start.text_bytes
    skipped, left_out = start.skipped, Counter(start.left_out)

    def batch(position: Position, read_bytes: int) -> _Batch:
        progress = Progress(
            position=position,
            text_bytes=text_bytes,
            skipped=skipped,
            left_out=dict(sorted(left_out.items())),
        )
        return _Batch(documents, size, progress, read_bytes)

    def on_skip(reason: str) -> None:
        nonlocal skipped
        skipped += 1
        name_skipped(reason)

    def on_leave_out(kind: str) -> None:
        left_out[kind] += 1

    for document in source.documents(start.position, on_skip, on_leave_out):
        documents.append(document)
        size += len(document.text)
        text_bytes += len(document.text.encode())
        if size >= BATCH_CHARACTERS:
            yield batch(document.after, document.read_bytes)
            documents, size = [], 0
    yield batch(Position(len(source.files)), source.size_bytes)


def _clear(folder: Path, kept: set[str]) -> None:
    """Removes what an earlier run wrote after its last save."""
    for path in folder.iterdir():
        if path.name not in kept and path.name != JOURNAL:
            path.unlink()
