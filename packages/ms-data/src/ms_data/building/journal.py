"""The journal of a build, kept beside its shards so that a killed build can go on."""

from collections.abc import Container
from pathlib import Path

import msgspec

from ms_data.corpus.corpus import Corpus, Position
from ms_data.disk.writer import DatasetState
from ms_data.errors import OutputError

_NAMES = {"chat": "the chat template or its settings", "tokenizer": "the tokenizer's checksum"}


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """All that decides the bytes of a dataset, apart from the corpus."""

    tokenizer: str
    end_of_text: int
    hold_out: float
    shard_size_bytes: int
    text_column: str
    libraries: str
    """Versions of tokenizers and zstandard."""
    chat: str
    """Template, kind and settings of an instruction set, as a checksum; empty for text."""
    skip_invalid: bool
    document_limit_mib: int

    def differences(self, other: "Recipe", *, besides: Container[str]) -> list[str]:
        """Name the fields that differ in `other`, but for those of `besides`, with both values."""
        return [
            f"{_NAMES.get(name, name)} is {getattr(other, name)!r}, was {getattr(self, name)!r}"
            for name in self.__struct_fields__
            if name not in besides and getattr(self, name) != getattr(other, name)
        ]


class AnswerCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The answers of conversations or pairs; zeros for text."""

    trained_tokens: int = 0
    """Tokens that are trained on."""
    answers: int = 0
    """Runs of such tokens."""
    ended: int = 0
    """Answers whose last token is a special one, such as the end of text."""

    def plus(self, other: "AnswerCounts") -> "AnswerCounts":
        """Add the counts of other samples."""
        return AnswerCounts(
            trained_tokens=self.trained_tokens + other.trained_tokens,
            answers=self.answers + other.answers,
            ended=self.ended + other.ended,
        )


class BuildProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a corpus is done."""

    position: Position = Position()
    text_bytes: int = 0
    """The documents as UTF-8."""
    skipped: int = 0
    """Documents left out because they are not valid text."""
    left_out: dict[str, int] = {}
    """Files of a folder left out because they are no text, by what they are."""
    empty: int = 0
    """Rows, lines and files that hold no text, which are no documents."""
    answers: AnswerCounts = AnswerCounts()


class BuildJournal(msgspec.Struct, frozen=True, kw_only=True, tag="ms-data.journal.5"):
    """The state of a build at a moment when all that it counts is safely on disk."""

    recipe: Recipe
    progress: BuildProgress
    files_read: str
    """Names, sizes and times of the files that were read so far, as a checksum."""
    dataset: DatasetState

    def check(self, recipe: Recipe, source: Corpus, folder: Path) -> None:
        """Check that a build can go on from here.

        Raises:
            OutputError: it has other settings or another corpus; names what differs.
        """
        # What was invalid may be left out from here on, which no earlier document depends on.
        besides = "skip_invalid" if recipe.skip_invalid else "document_limit_mib"
        differing = self.recipe.differences(recipe, besides=[besides])
        if source.identity(self.progress.position.file + 1) != self.files_read:
            differing.append("the corpus has other files, or other content")
        if differing:
            raise OutputError(
                f"{folder} holds an interrupted build that cannot go on with other settings: "
                f"{'; '.join(differing)}; give those it had, or remove the folder"
            )
