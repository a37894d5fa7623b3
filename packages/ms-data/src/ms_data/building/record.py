"""The record of a finished build, so that the same command again has nothing to do."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from ms_data.building.encoders import TextEncoder
from ms_data.building.journal import AnswerCounts, BuildProgress, Recipe
from ms_data.corpus.corpus import Corpus
from ms_data.corpus.file_kinds import omissions
from ms_data.disk.format import BUILD_FILE, ShardEntry, sealed
from ms_data.disk.split import read_index
from ms_data.errors import DataError, OutputError, printable
from ms_data.files.durable import write_file
from ms_data.files.untrusted import decode_json, read_bytes

LIMIT_BYTES = 1 << 20


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What a build wrote."""

    folder: str
    documents: int
    tokens: int
    shards: int
    size_bytes: int
    """All shards together."""
    text_bytes: int
    """The documents as UTF-8."""
    skipped: int
    """Documents left out because they are not valid text."""
    left_out: dict[str, int]
    """Files of a folder left out because they are no text, by what they are."""
    splits: dict[str, int]
    """Tokens in each split."""
    encoder: str
    """What turned text into tokens, in words."""
    empty: int = 0
    """Rows, lines and files that hold no text, which are no documents."""
    built_before: bool = False
    """Whether all of it was there already, so that nothing was done."""
    split_documents: dict[str, int] = {}
    """Documents in each split."""
    begin_of_text: tuple[str, ...] = ()
    """The tokens that begin each document of text, by name."""
    end_of_text: str = ""
    """The token that ends each document of text, by name."""
    answers: AnswerCounts = AnswerCounts()
    """The answers of conversations or pairs."""
    warnings: tuple[str, ...] = ()
    """What is probably not as intended, a line each."""

    @classmethod
    def of(
        cls,
        shards: Sequence[ShardEntry],
        progress: BuildProgress,
        recipe: Recipe,
        encoder: TextEncoder,
    ) -> "Summary":
        """Sum up these shards."""
        splits: Counter[str] = Counter()
        documents: Counter[str] = Counter()
        of_text = [shard for shard in shards if not shard.holds_media]
        for shard in of_text:
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
            begin_of_text=encoder.tokenizer.begin_of_text_names if encoder.kind == "text" else (),
            end_of_text=encoder.tokenizer.end_of_text_name,
            answers=progress.answers,
            warnings=tuple(_warnings(documents, progress.answers, recipe)),
        )

    @property
    def omissions(self) -> str:
        """What was left out, as a part of a line; empty where nothing was."""
        return omissions(self.left_out, self.skipped, self.empty)

    @property
    def contents(self) -> str:
        """What each document holds besides its text, as a part of a line."""
        found = self.answers
        if found.answers:
            return (
                f"{found.trained_tokens:,} tokens of {found.answers:,} answers are trained on "
                f"({found.ended:,} end with a special token); "
            )
        if not self.end_of_text:
            return ""
        begin = f"begin with {' '.join(self.begin_of_text)} and " if self.begin_of_text else ""
        return f"documents {begin}end with {self.end_of_text}; "


def _warnings(documents: Mapping[str, int], answers: AnswerCounts, recipe: Recipe) -> Iterator[str]:
    total = sum(documents.values())
    if recipe.hold_out and not documents.get("held_out"):
        yield (
            f"hold_out={recipe.hold_out:g} held out none of {total:,} documents, which are chosen "
            "by a hash of their text; raise --hold-out, or evaluate on other data"
        )
    if not documents.get("train"):
        yield f"all {total:,} documents are held out and none is left to train on; lower --hold-out"
    if answers.answers and not answers.ended:
        yield (
            f"none of {answers.answers:,} answers ends with a special token that is trained on, so "
            "a model does not learn to end its answers; print the end of a turn after each answer "
            "in the chat template, inside {% generation %} where it has that"
        )


class BuildRecord(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="ms-data.build.5"
):
    """What a dataset was built from, and with which settings."""

    recipe: Recipe
    listing: str
    """Names and sizes of the files of the corpus, as a checksum."""
    content: str
    """Their bytes, as a checksum."""
    summary: Summary
    checksum: str = ""
    """Hexadecimal xxh3-128 of this record with an empty checksum."""


def save_record(folder: Path, recipe: Recipe, source: Corpus, summary: Summary) -> None:
    """Write the record of a finished build; read all of the corpus for its checksum.

    Raises:
        OutputError: the disk is full or the place cannot be written.
    """
    record = BuildRecord(
        recipe=recipe, listing=source.listing, content=source.content(), summary=summary
    )
    write_file(folder / BUILD_FILE, sealed(record, "checksum"))


def summary_of(folder: Path, recipe: Recipe, source: Corpus, out: str | Path) -> Summary | None:
    """Return the summary of the finished build in `folder`, if it is the one asked for.

    Raises:
        OutputError: it is another build, of which it names what differs; or shards are damaged.
    """
    path = folder / BUILD_FILE
    if not os.path.exists(path) or not os.path.exists(folder / "index.json"):
        return None
    content = read_bytes(path, error=OutputError, limit_bytes=LIMIT_BYTES)
    before = decode_json(content, BuildRecord, where=path, error=OutputError)
    if sealed(before, "checksum") != content:
        raise OutputError(f"{printable(path)}: damaged; remove {printable(out)} to build anew")
    # A larger limit alone, under which all documents were valid, gives the same bytes.
    differing = before.recipe.differences(recipe, besides=["document_limit_mib"])
    if before.listing != source.listing:
        differing.append("the corpus has other files, or other content")
    changed = source.changed_since(path.stat().st_mtime_ns)
    if changed and not differing and source.content() != before.content:
        differing.append(f"the corpus has other content, as {printable(changed)} may")
    if differing:
        raise OutputError(
            f"{printable(out)} is not empty: it holds another build: "
            f"{'; '.join(differing)}; choose another folder, or remove it"
        )
    _check_sizes(folder, out)
    return msgspec.structs.replace(before.summary, folder=str(out), built_before=True)


def _check_sizes(folder: Path, out: str | Path) -> None:
    try:
        shards = read_index(folder).shards
    except DataError as error:
        raise OutputError(f"{error}; or remove {printable(out)} to build anew") from error
    for shard in shards:
        path = folder / shard.name
        size = path.stat().st_size if path.exists() else 0
        if size != shard.size_bytes:
            raise OutputError(
                f"{printable(path)}: damaged: {size} bytes where {shard.size_bytes} were written; "
                f"remove {printable(out)} to build anew"
            )
