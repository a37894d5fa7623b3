"""Record of a finished build; a repeated command then has nothing to do."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from ms_data.building.encoders import TextEncoder
from ms_data.building.journal import AnswerCounts, BuildProgress, Recipe
from ms_data.corpus.corpus import Corpus
from ms_data.corpus.file_kinds import omissions
from ms_data.disk.format import BUILD_FILE, ShardEntry, encode_sealed
from ms_data.disk.split import read_index
from ms_data.errors import DataError, OutputError, printable
from ms_data.files.durable import write_file
from ms_data.files.untrusted import decode_json, read_bytes

LIMIT_BYTES = 1 << 20


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

    @classmethod
    def of(
        cls,
        shards: Sequence[ShardEntry],
        progress: BuildProgress,
        recipe: Recipe,
        encoder: TextEncoder,
    ) -> "Summary":
        """Summarize a build from its shards."""
        splits: Counter[str] = Counter()
        documents: Counter[str] = Counter()
        document_shards = [shard for shard in shards if not shard.holds_media]
        for shard in document_shards:
            splits[shard.split] += shard.tokens
            documents[shard.split] += shard.documents
        return cls(
            folder="",
            documents=documents.total(),
            tokens=splits.total(),
            shards=len(shards),
            size_bytes=sum(shard.size_bytes for shard in shards),
            text_bytes=progress.text_bytes,
            skipped=progress.skipped,
            empty=progress.empty,
            left_out=progress.left_out,
            splits=dict(splits),
            split_documents=dict(documents),
            encoder=encoder.method,
            begin_of_text=encoder.tokenizer.begin_of_text_names
            if encoder.document_kind == "text"
            else (),
            end_of_text=encoder.tokenizer.end_of_text_name,
            answers=progress.answers,
            warnings=tuple(_warnings(documents, progress.answers, recipe)),
        )

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


def _warnings(documents: Mapping[str, int], answers: AnswerCounts, recipe: Recipe) -> Iterator[str]:
    total = sum(documents.values())
    if recipe.hold_out and not documents.get("held_out"):
        yield (
            f"hold_out={recipe.hold_out:g} selected none of {total:,} documents, as the choice "
            "depends on a hash of their text; raise --hold-out, or evaluate on other data"
        )
    if not documents.get("train"):
        yield f"all {total:,} documents are held out, leaving none for training; lower --hold-out"
    if answers.answers and not answers.ended:
        yield (
            f"none of {answers.answers:,} answers ends with a special token that has loss, so the "
            "model does not learn to stop; print an end-of-turn token after each answer in the "
            "chat template, inside {% generation %} if it uses that"
        )


class BuildRecord(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="ms-data.build.5"
):
    """Sources, settings and summary of a dataset."""

    recipe: Recipe
    listing: str
    """Checksum of the names and sizes of the corpus files."""
    content: str
    """Checksum of the content of the corpus files."""
    summary: Summary
    checksum: str = ""
    """xxh3-128 of this record with an empty checksum, hexadecimal."""


def save_record(folder: Path, recipe: Recipe, source: Corpus, summary: Summary) -> None:
    """Write the record of a finished build, which reads the corpus once more for its checksum.

    Raises:
        OutputError: the disk is full, or the file cannot be written.
    """
    record = BuildRecord(
        recipe=recipe,
        listing=source.listing_digest,
        content=source.content_digest(),
        summary=summary,
    )
    write_file(folder / BUILD_FILE, encode_sealed(record, "checksum"))


def finished_summary(
    folder: Path, recipe: Recipe, source: Corpus, out: str | Path
) -> Summary | None:
    """Return the summary if `folder` holds this build, None if it holds no build.

    Raises:
        OutputError: the folder holds another build (names the differences), or damaged shards.
    """
    path = folder / BUILD_FILE
    if not os.path.exists(path) or not os.path.exists(folder / "index.json"):
        return None
    content = read_bytes(path, error=OutputError, limit_bytes=LIMIT_BYTES)
    saved = decode_json(content, BuildRecord, where=path, error=OutputError)
    if encode_sealed(saved, "checksum") != content:
        raise OutputError(f"{printable(path)}: damaged; remove {printable(out)} to rebuild")
    # All documents were valid under the old limit, so a larger one gives the same bytes.
    changes = saved.recipe.differences(recipe, ignored=["document_limit_mib"])
    if saved.listing != source.listing_digest:
        changes.append("the corpus has different files or content")
    # Only hash the corpus again if a file is newer than the record.
    changed = source.changed_since(path.stat().st_mtime_ns)
    if changed and not changes and source.content_digest() != saved.content:
        changes.append(f"the corpus content changed, possibly in {printable(changed)}")
    if changes:
        raise OutputError(
            f"{printable(out)} is not empty: it holds another build: "
            f"{'; '.join(changes)}; use another folder, or remove it"
        )
    _check_sizes(folder, out)
    return msgspec.structs.replace(saved.summary, folder=str(out), built_before=True)


def _check_sizes(folder: Path, out: str | Path) -> None:
    try:
        shards = read_index(folder).shards
    except DataError as error:
        raise OutputError(f"{error}; or remove {printable(out)} to rebuild") from error
    for shard in shards:
        path = folder / shard.name
        size = path.stat().st_size if path.exists() else 0
        if size != shard.size_bytes:
            raise OutputError(
                f"{printable(path)}: damaged: has {size} bytes, but {shard.size_bytes} were "
                f"written; remove {printable(out)} to rebuild"
            )
