"""Corpus to shards: read, tokenize on all cores, deal to splits, compress, publish.

A build works in a folder beside the one asked for, `OUT.partial`, and renames it at the end, so
that OUT is whole or not there. Every few seconds it syncs its shards and notes how far it is;
the same command after a crash goes on from that note and ends in the same bytes.
"""

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import tokenizers
import xxhash
import zstandard
from numpy.typing import NDArray

from ms_data.building.encoding import ChatEncoder
from ms_data.building.folder import build_folder, free_place
from ms_data.building.journal import Journal, Recipe, load_journal, save_journal
from ms_data.building.record import BUILD_FILE, Finished, Summary, encode_finished, summary_of
from ms_data.chat.template import ChatTemplate
from ms_data.corpus.corpus import DOCUMENT_LIMIT_MIB, Corpus, Document, Position, find_corpus
from ms_data.disk.format import (
    FRAME_BYTES,
    Index,
    ShardEntry,
    TokenType,
    encode_index,
    token_type_for,
)
from ms_data.disk.writer import DatasetWriter
from ms_data.errors import CorpusError, OutputError, SettingError
from ms_data.files.durable import publish, sync_folder, write_file, writing
from ms_data.tokenization.tokenizer import Tokenizer

__all__ = ["Summary", "build"]

BATCH_CHARACTERS = 1 << 20
"""Text that is tokenized at once; its tokens take some 150 MB until they are written."""

BATCHES_AHEAD = max(2, (os.cpu_count() or 1) // 4)
"""Batches that are tokenized while one is written, so that no core waits for a long document."""

CHARACTERS_AHEAD = (BATCHES_AHEAD + 2) * BATCH_CHARACTERS
"""Text in all these batches; more than that waits, unless it is one document."""

SAVE_EVERY_S = 5.0
"""A build that is killed loses at most about this much work."""

JOURNAL = "journal.msgpack"

_Encoded = Sequence[NDArray[np.integer]]


def build(
    corpus: str | Path,
    *,
    tokenizer: str | Path | Tokenizer,
    out: str | Path,
    hold_out: float = 0.0,
    shard_size_mib: int = 64,
    text_key: str = "text",
    skip_invalid: bool = False,
    chat: str | Path | ChatTemplate | None = None,
    pairs: bool = False,
    allow_special: bool = False,
    document_limit_mib: int = DOCUMENT_LIMIT_MIB,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Summary:
    """Tokenizes a corpus into a folder of checked, compressed shards.

    Documents keep the order of the corpus and each ends in the tokenizer's end of text. If an
    earlier build of the same corpus was interrupted, this one goes on from there; the bytes are
    the same as without interruption. If it was finished, there is nothing to do.

    Args:
        corpus: a file or folder of text or JSON Lines, plain or packed by gzip or zstd, or
            `stdlib`; see `find_corpus`.
        tokenizer: a `tokenizer.json` or a loaded one.
        out: the folder to make; it must not hold anything but the same build.
        hold_out: share of documents, 0 ≤ share < 1, that goes to the split `held_out`. A
            document's text alone decides, so the same text is never in both splits.
        shard_size_mib: a shard is closed at the first document end past this size.
        text_key: the member of a JSON line that holds the text.
        skip_invalid: leave out what is not valid text instead of stopping.
        chat: the chat template, or the tokenizer's folder that holds it, with which an
            instruction set in JSON Lines is built; see `read_conversation` for its forms. A Jinja
            file is told the special tokens of the tokenizer's folder.
        pairs: with `chat`, the rows are preference pairs; see `read_pair`.
        allow_special: with `chat`, messages may spell special tokens.
        document_limit_mib: a document, once unpacked, of more than so many MiB stops the build; it
            is tokenized in one piece, which takes some 130 times its size.
        on_progress: hears how many of how many bytes of the corpus are done, after each batch.

    Raises:
        SettingError: an argument is out of range.
        CorpusError: the corpus is missing, empty, damaged or not text.
        TokenizerError: the tokenizer cannot be read.
        OutputError: `out` is not empty, lies in the corpus, is being written by another build,
            belongs to another build that was interrupted or to something else, or the disk is full.
    """
    if not 0.0 <= hold_out < 1.0:
        raise SettingError(f"hold_out is {hold_out}; it must be a share from 0 to below 1")
    if shard_size_mib < 1:
        raise SettingError(f"shard_size_mib is {shard_size_mib}; it must be 1 or more")
    encoder = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer.load(tokenizer)
    chats = _chat_encoder(chat, encoder, pairs=pairs, allow_special=allow_special)
    parse = chats.parse if chats else None
    source = find_corpus(
        corpus,
        text_key=text_key,
        skip_invalid=skip_invalid,
        parse=parse,
        document_limit_mib=document_limit_mib,
    )
    recipe = Recipe(
        tokenizer=encoder.digest,
        end_of_text=encoder.end_of_text,
        hold_out=hold_out,
        shard_size_bytes=shard_size_mib << 20,
        text_key=text_key,
        libraries=f"tokenizers {tokenizers.__version__}, zstandard {zstandard.__version__}",
        chat=chats.digest if chats else "",
    )
    wanted = Finished(
        recipe=recipe,
        skip_invalid=source.skip_invalid,
        document_limit_bytes=source.document_limit_bytes,
        listing=source.listing,
        content="",
        summary=_NOTHING,
    )
    with writing(Path(out)):
        folder = Path(os.path.realpath(out))
        if (done := summary_of(folder, wanted, source, out)) is not None:
            return done
    folder = free_place(out)
    _refuse_inside(folder, corpus)
    aside = folder.with_name(folder.name + ".partial")
    with build_folder(aside, JOURNAL):
        summary = _Build(source, encoder, chats, recipe, aside, on_progress).run()
        finished = msgspec.structs.replace(wanted, content=source.content(), summary=summary)
        write_file(aside / BUILD_FILE, encode_finished(finished))
        (aside / JOURNAL).unlink(missing_ok=True)
        sync_folder(aside)
        publish(aside, folder)
    return msgspec.structs.replace(summary, folder=str(out))


def _refuse_inside(folder: Path, corpus: str | Path) -> None:
    """A build must not read what it or an earlier one writes; what is hidden is never read."""
    place = Path(os.path.realpath(corpus))
    if not place.is_dir() or not folder.is_relative_to(place):
        return
    if not any(part.startswith(".") for part in folder.relative_to(place).parts):
        raise OutputError(
            f"{folder} lies in the corpus {corpus}, which the next build would read it with; "
            "choose a folder outside"
        )


def _chat_encoder(
    chat: str | Path | ChatTemplate | None,
    tokenizer: Tokenizer,
    *,
    pairs: bool,
    allow_special: bool,
) -> ChatEncoder | None:
    if chat is None:
        if pairs or allow_special:
            raise SettingError("pairs and allow_special need a chat template; give `chat`")
        return None
    template = chat if isinstance(chat, ChatTemplate) else ChatTemplate.load(chat)
    if template.asks_date and template.today is None:
        raise SettingError(
            "the chat template prints today's date, so a build would differ from day to day; "
            "choose the date with --today"
        )
    return ChatEncoder(
        template=template.with_tokens_of(tokenizer.folder),
        tokenizer=tokenizer,
        kind="preferences" if pairs else "conversations",
        allow_special=allow_special,
    )


_NOTHING = Summary(
    folder="",
    documents=0,
    tokens=0,
    shards=0,
    size_bytes=0,
    text_bytes=0,
    skipped=0,
    left_out={},
    splits={},
)


class _Batch(NamedTuple):
    """Documents that are tokenized together."""

    documents: list[Document]
    skipped: int
    """Documents left out before the last of them, from the beginning of the corpus."""
    left_out: Counter[str]
    """Files that are no text, likewise."""

    @property
    def characters(self) -> int:
        """Length of all documents."""
        return sum(len(document.text) for document in self.documents)


class _Build:
    """One run of a build in its folder."""

    def __init__(
        self,
        source: Corpus,
        encoder: Tokenizer,
        chats: ChatEncoder | None,
        recipe: Recipe,
        aside: Path,
        on_progress: Callable[[int, int], None],
    ) -> None:
        self._source, self._encoder, self._recipe = source, encoder, recipe
        self._chats = chats
        self._encode: Callable[[list[str]], _Encoded] = (
            chats.encode if chats else encoder.encode_documents
        )
        self._aside, self._on_progress = aside, on_progress
        journal = load_journal(aside / JOURNAL)
        if journal is not None:
            self._check(journal)
        self._clear(set(journal.dataset.names) if journal else set())
        self._token_type: TokenType = "uint32" if chats else token_type_for(encoder.vocabulary_size)
        self._frame_tokens = FRAME_BYTES // (2 if self._token_type == "uint16" else 4)
        self._position = Position(journal.file, journal.documents) if journal else Position()
        self._text_bytes = journal.text_bytes if journal else 0
        self._skipped = journal.skipped if journal else 0
        self._left_out = Counter(journal.left_out if journal else {})
        self._writer = DatasetWriter(
            aside,
            token_type=self._token_type,
            frame_tokens=self._frame_tokens,
            shard_size_bytes=recipe.shard_size_bytes,
            state=journal.dataset if journal else None,
        )

    def run(self) -> Summary:
        """Writes all that is left to write."""
        try:
            saved = time.monotonic()
            with closing(self._encoded()) as batches:
                for batch, encoded in batches:
                    self._write(batch, encoded)
                    if batch.documents and time.monotonic() - saved >= SAVE_EVERY_S:
                        self._save()
                        saved = time.monotonic()
            return self._finish(self._writer.close())
        finally:
            self._writer.abandon()

    def _encoded(self) -> Generator[tuple[_Batch, _Encoded], None, None]:
        """Each batch with its tokens, in order; some batches ahead are being tokenized."""
        ahead: deque[tuple[_Batch, Future[_Encoded]]] = deque()
        pool = ThreadPoolExecutor(BATCHES_AHEAD)
        try:
            for batch in self._batches():
                texts = [document.text for document in batch.documents]
                ahead.append((batch, pool.submit(self._encode, texts)))
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

    def _batches(self) -> Iterator[_Batch]:
        documents: list[Document] = []
        size, skipped, counted = 0, self._skipped, self._skipped
        left_out, seen = Counter(self._left_out), Counter(self._left_out)

        def on_skip(reason: str) -> None:
            nonlocal skipped
            skipped += 1

        def on_leave_out(kind: str) -> None:
            left_out[kind] += 1

        for document in self._source.documents(self._position, on_skip, on_leave_out):
            documents.append(document)
            size, counted, seen = size + len(document.text), skipped, Counter(left_out)
            if size >= BATCH_CHARACTERS:
                yield _Batch(documents, counted, seen)
                documents, size = [], 0
        if documents:
            yield _Batch(documents, counted, seen)
        # What was left out after the last document is counted, but stands in no journal:
        # a build that goes on from the last document meets it again.
        yield _Batch([], skipped, left_out)

    def _write(self, batch: _Batch, encoded: _Encoded) -> None:
        for document, tokens in zip(batch.documents, encoded, strict=True):
            self._text_bytes += len(document.text.encode())
            self._writer.append("held_out" if self._is_held(document) else "train", tokens)
        self._skipped, self._left_out = batch.skipped, batch.left_out
        if batch.documents:
            last = batch.documents[-1]
            self._position = last.after
            self._on_progress(last.read_bytes, self._source.size_bytes)

    def _is_held(self, document: Document) -> bool:
        if not self._recipe.hold_out:
            return False
        text = self._chats.words(document.text) if self._chats else document.text
        return xxhash.xxh3_64_intdigest(text.encode()) < self._recipe.hold_out * 2.0**64

    def _save(self) -> None:
        journal = Journal(
            recipe=self._recipe,
            skip_invalid=self._source.skip_invalid,
            document_limit_bytes=self._source.document_limit_bytes,
            file=self._position.file,
            documents=self._position.documents,
            files_read=self._source.identity(self._position.file + 1),
            text_bytes=self._text_bytes,
            skipped=self._skipped,
            left_out=dict(self._left_out),
            dataset=self._writer.state(),
        )
        save_journal(self._aside / JOURNAL, journal)

    def _clear(self, kept: set[str]) -> None:
        """Removes what an earlier run wrote after its last save."""
        for path in self._aside.iterdir():
            if path.name not in kept and path.name != JOURNAL:
                path.unlink()

    def _check(self, journal: Journal) -> None:
        """Refuses to go on with another build."""
        differing = journal.recipe.differences(self._recipe)
        if journal.skip_invalid and not self._source.skip_invalid:
            differing.append("skip_invalid is off, was on")
        limits = journal.document_limit_bytes, self._source.document_limit_bytes
        if self._source.skip_invalid and limits[0] != limits[1]:
            before, now = (limit >> 20 for limit in limits)
            differing.append(f"document_limit_mib is {now}, was {before}")
        if self._source.identity(journal.file + 1) != journal.files_read:
            differing.append("the corpus has other files, or other content")
        if differing:
            raise OutputError(
                f"{self._aside} holds an interrupted build that cannot go on with other settings: "
                f"{'; '.join(differing)}; give what it had, or remove the folder"
            )

    def _finish(self, shards: tuple[ShardEntry, ...]) -> Summary:
        if not shards:
            files = len(self._source.files)
            nothing = msgspec.structs.replace(
                _NOTHING, skipped=self._skipped, left_out=self._left_out
            )
            raise CorpusError(
                f"{self._source.name} is empty: no text in {files} files{nothing.omissions}; "
                "give a corpus that holds text"
            )
        write_file(self._aside / "tokenizer.json", self._encoder.content)
        template = b""
        for name, content in (self._chats.template.files() if self._chats else {}).items():
            write_file(self._aside / name, content)
            template += content
        index = Index(
            token_type=self._token_type,
            frame_tokens=self._frame_tokens,
            vocabulary_size=self._encoder.vocabulary_size,
            end_of_text=self._encoder.end_of_text,
            tokenizer=self._encoder.digest,
            hold_out=self._recipe.hold_out,
            shards=shards,
            kind=self._chats.kind if self._chats else msgspec.UNSET,
            chat=xxhash.xxh3_128_hexdigest(template) if self._chats else msgspec.UNSET,
        )
        write_file(self._aside / "index.json", encode_index(index))
        return Summary(
            folder="",
            documents=sum(shard.documents for shard in shards),
            tokens=sum(shard.tokens for shard in shards),
            shards=len(shards),
            size_bytes=sum(shard.size_bytes for shard in shards),
            text_bytes=self._text_bytes,
            skipped=self._skipped,
            left_out=dict(sorted(self._left_out.items())),
            splits={
                name: sum(shard.tokens for shard in shards if shard.split == name)
                for name in index.splits
            },
        )
