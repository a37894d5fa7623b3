"""Output of a build: shards, tokenizer, index, and a record by which a repeated build finds it."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import xxhash
from attrs import define, field

from ms_data.building.answers import AnswerCounter, AnswerCounts
from ms_data.building.batch_encoding import EncodedBatch, EncodedDocs
from ms_data.building.encoders import TextEncoder
from ms_data.corpus.corpus import Corpus
from ms_data.corpus.file_kinds import omissions
from ms_data.disk.format import (
    BUILD_FILE,
    DOCUMENT_KINDS,
    FRAME_BYTES,
    MEDIA_SUFFIX,
    Index,
    ShardEntry,
    encode_index,
    encode_sealed,
    token_type_for,
)
from ms_data.disk.media import set_media_span
from ms_data.disk.split import read_index
from ms_data.disk.writer import DatasetState, DatasetWriter
from ms_data.engine.batches import DocumentBatch, Progress
from ms_data.engine.record import changes_since, check_sizes
from ms_data.errors import CorpusError, DataError, OutputError, printable
from ms_data.files.durable import write_file
from ms_data.files.untrusted import decode_json, read_bytes
from ms_data.files.work_folder import JOURNAL

LIMIT_BYTES = 1 << 20
"""Largest accepted record."""

BUILD_FILES = re.compile(
    r"(shard-\d{5,}\.msd|index\.json|build\.json|tokenizer\.json|tokenizer_config\.json|"
    r"chat_template\.jinja|media\.json|journal\.msgpack)(\.partial)?"
)
"""Names of all files that a build writes."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a build."""

    folder: str
    documents: int
    tokens: int
    shards: int
    size_bytes: int
    """Total size of the shards."""
    text_bytes: int
    """UTF-8 bytes of the documents."""
    skipped: int
    """Documents skipped because they are not valid text."""
    left_out: dict[str, int]
    """Number of skipped non-text files, by file type."""
    splits: dict[str, int]
    """Tokens per split."""
    encoder: str
    """Description of the encoder."""
    empty: int = 0
    """Rows, lines and files without text."""
    built_before: bool = False
    """Whether the dataset existed already, so that nothing was done."""
    split_documents: dict[str, int] = {}
    """Documents per split."""
    begin_of_text: tuple[str, ...] = ()
    """Names of the tokens that start a text document."""
    end_of_text: str = ""
    """Name of the token that ends a text document."""
    answers: AnswerCounts = AnswerCounts()
    """Answers in conversations or pairs."""
    warnings: tuple[str, ...] = ()
    """Likely mistakes, one line each."""

    @property
    def omissions(self) -> str:
        """Skipped documents and files as the end of a line; empty if nothing was skipped."""
        return omissions(self.left_out, self.skipped, self.empty)

    @property
    def contents(self) -> str:
        """Tokens added to documents, or answer counts, as part of a line."""
        answers = self.answers
        if answers.answers:
            return (
                f"{answers.trained_tokens:,} tokens of {answers.answers:,} answers are trained on "
                f"({answers.ended:,} end with a special token); "
            )
        if not self.end_of_text:
            return ""
        begin = f"start with {' '.join(self.begin_of_text)} and " if self.begin_of_text else ""
        return f"documents {begin}end with {self.end_of_text}; "


class BuildRecord(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="ms-data.build.5"
):
    """Sources, settings and summary of a dataset."""

    recipe: dict[str, Any]
    """Everything that determines the bytes of a dataset, apart from the corpus."""
    listing: str
    """Checksum of the names and sizes of the corpus files."""
    content: str
    """Checksum of the content of the corpus files."""
    summary: Summary
    checksum: str = ""
    """xxh3-128 of this record with an empty checksum, hexadecimal."""


class BuildState(msgspec.Struct, frozen=True, kw_only=True):
    """Shards and totals of an unfinished build."""

    dataset: DatasetState
    text_bytes: int
    skipped: int
    answers: AnswerCounts


@define(kw_only=True)
class ShardOutput:
    """Assigns documents to splits, and writes them to shards."""

    source: Corpus
    encoder: TextEncoder
    recipe: Mapping[str, Any]
    held_out_fraction: float
    shard_size_bytes: int
    _folder: Path = field(init=False)
    _writer: DatasetWriter | None = field(init=False, default=None)
    _text_bytes: int = field(init=False, default=0)
    _skipped: int = field(init=False, default=0)
    _answers: AnswerCounts = field(init=False, default=AnswerCounts())

    def finished(self, folder: Path, out: str | Path) -> Summary | None:
        """Return the summary if `folder` holds this build, None if it holds no build.

        Raises:
            OutputError: the folder holds another build (names the differences), or damaged shards.
        """
        path = folder / BUILD_FILE
        if not os.path.exists(path) or not os.path.exists(folder / "index.json"):
            return None
        content = read_bytes(path, error=OutputError, limit_bytes=LIMIT_BYTES)
        record = decode_json(content, BuildRecord, where=path, error=OutputError)
        if encode_sealed(record, "checksum") != content:
            raise OutputError(f"{printable(path)}: damaged; remove {printable(out)} to rebuild")
        # All documents were valid under the old limit, so a larger one gives the same bytes.
        changes = changes_since(
            path, record, self.recipe, self.source, ignored=["document_limit_mib"]
        )
        if changes:
            raise OutputError(
                f"{printable(out)} is not empty: it holds another build: {'; '.join(changes)}; use "
                "another folder, or remove it"
            )
        try:
            shards = read_index(folder).shards
        except DataError as error:
            raise OutputError(f"{error}; or remove {printable(out)} to rebuild") from error
        check_sizes(
            folder,
            ((shard.name, shard.size_bytes) for shard in shards),
            remedy=f"remove {printable(out)} to rebuild",
        )
        return msgspec.structs.replace(record.summary, folder=str(out), built_before=True)

    def open(self, folder: Path, state: BuildState | None) -> None:  # noqa: D102
        saved = {JOURNAL, *(state.dataset.names if state else ())}
        for path in folder.iterdir():
            if path.name not in saved:
                path.unlink()
        if state:
            self._text_bytes, self._skipped = state.text_bytes, state.skipped
            self._answers = state.answers
        self._folder = folder
        tokenizer = self.encoder.tokenizer
        token_type = token_type_for(tokenizer.vocabulary_size, self.encoder.document_kind)
        self._writer = DatasetWriter(
            folder,
            token_type=token_type,
            frame_tokens=FRAME_BYTES // (2 if token_type == "uint16" else 4),
            shard_size_bytes=self.shard_size_bytes,
            state=state.dataset if state else None,
        )

    def write(self, batch: DocumentBatch, result: EncodedDocs) -> None:  # noqa: D102
        assert self._writer is not None
        texts = batch.texts
        for text, (words, media) in zip(texts, result, strict=True):
            split = "held_out" if self._is_held_out(text) else "train"
            if media is not None:
                media_split = split + MEDIA_SUFFIX
                words = set_media_span(words, self._writer.tokens(media_split), len(media))
                self._writer.append(media_split, media)
            self._writer.append(split, words)
            self._text_bytes += len(text.encode())
        self._skipped += len(batch.items) - len(texts)
        if self.encoder.document_kind != "text":
            header_words = DOCUMENT_KINDS[self.encoder.document_kind].header_words
            counter = AnswerCounter(self.encoder.tokenizer, header_words)
            for words, _ in result:
                self._answers = self._answers.plus(counter.count(words))

    def _is_held_out(self, text: str) -> bool:
        if not self.held_out_fraction:
            return False
        key = self.encoder.hold_out_key(text).encode()
        # The choice depends on the text only, so duplicates end up in the same split.
        return xxhash.xxh3_64_intdigest(key) < self.held_out_fraction * 2.0**64

    def save(self) -> BuildState:  # noqa: D102
        assert self._writer is not None
        return BuildState(
            dataset=self._writer.state(),
            text_bytes=self._text_bytes,
            skipped=self._skipped,
            answers=self._answers,
        )

    def finish(self, progress: Progress) -> Summary:
        """Finish the shards, and write tokenizer, index and record.

        Raises:
            CorpusError: the corpus holds no text.
        """
        assert self._writer is not None
        writer, tokenizer = self._writer, self.encoder.tokenizer
        shards = writer.close()
        if not shards:
            missing = omissions(progress.left_out, self._skipped, progress.empty)
            raise CorpusError(
                f"{self.source.name} is empty: no text in {len(self.source.files)} files{missing}; "
                "use a corpus with text"
            )
        files = self.encoder.files()
        for name, content in {"tokenizer.json": tokenizer.content, **files}.items():
            write_file(self._folder / name, content)
        chat = xxhash.xxh3_128_hexdigest(b"".join(files.values()))
        index = Index(
            token_type=writer.token_type,
            frame_tokens=writer.frame_tokens,
            vocabulary_size=tokenizer.vocabulary_size,
            end_of_text=tokenizer.end_of_text,
            tokenizer=tokenizer.digest,
            held_out_fraction=self.held_out_fraction,
            shards=shards,
            kind=self.encoder.document_kind if files else msgspec.UNSET,
            chat=chat if files else msgspec.UNSET,
        )
        write_file(self._folder / "index.json", encode_index(index))
        record = BuildRecord(
            recipe=dict(self.recipe),
            listing=self.source.listing_digest,
            content=self.source.content_digest(),
            summary=self._summary(shards, progress),
        )
        write_file(self._folder / BUILD_FILE, encode_sealed(record, "checksum"))
        return record.summary

    def _summary(self, shards: Sequence[ShardEntry], progress: Progress) -> Summary:
        splits: Counter[str] = Counter()
        documents: Counter[str] = Counter()
        for shard in shards:
            if not shard.holds_media:
                splits[shard.split] += shard.tokens
                documents[shard.split] += shard.documents
        tokenizer = self.encoder.tokenizer
        is_text = self.encoder.document_kind == "text"
        return Summary(
            folder="",
            documents=documents.total(),
            tokens=splits.total(),
            shards=len(shards),
            size_bytes=sum(shard.size_bytes for shard in shards),
            text_bytes=self._text_bytes,
            skipped=self._skipped,
            empty=progress.empty,
            left_out=progress.left_out,
            splits=dict(splits),
            split_documents=dict(documents),
            encoder=self.encoder.method,
            begin_of_text=tokenizer.begin_of_text_names if is_text else (),
            end_of_text=tokenizer.end_of_text_name,
            answers=self._answers,
            warnings=tuple(_warnings(documents, self._answers, self.held_out_fraction)),
        )

    def abandon(self) -> None:  # noqa: D102
        if self._writer is not None:
            self._writer.abandon()

    def summarize(  # noqa: D102
        self, file: Path, results: Iterable[bytes], done_before: bool
    ) -> Summary:
        batches = [msgspec.msgpack.decode(content, type=EncodedBatch) for content in results]
        sizes = [size for batch in batches for size in batch.sizes]
        return Summary(
            folder=str(file),
            documents=len(sizes),
            tokens=sum(sizes),
            shards=0,
            size_bytes=file.stat().st_size,
            text_bytes=sum(batch.text_bytes for batch in batches),
            skipped=0,
            left_out={},
            splits={},
            encoder=self.encoder.method,
            built_before=done_before,
        )


def _warnings(
    documents: Mapping[str, int], answers: AnswerCounts, held_out_fraction: float
) -> Iterator[str]:
    total = sum(documents.values())
    if held_out_fraction and not documents.get("held_out"):
        yield (
            f"held_out_fraction={held_out_fraction:g} selected none of {total:,} documents, as "
            "the choice depends on a hash of their text; raise --held-out-fraction, or evaluate "
            "on other data"
        )
    if not documents.get("train"):
        yield (
            f"all {total:,} documents are held out, leaving none for training; "
            "lower --held-out-fraction"
        )
    if answers.answers and not answers.ended:
        yield (
            f"none of {answers.answers:,} answers ends with a special token that has loss, so the "
            "model does not learn to stop; print an end-of-turn token after each answer in the "
            "chat template, inside {% generation %} if it uses that"
        )
