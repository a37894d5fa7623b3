"""Journal of a build, stored with the shards, from which a killed build resumes."""

from collections.abc import Container
from pathlib import Path

import msgspec

from ms_data.corpus.corpus import Corpus, Position
from ms_data.disk.writer import DatasetState
from ms_data.errors import OutputError

_NAMES = {"chat": "the chat template or its settings", "tokenizer": "the tokenizer's checksum"}


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that determines the bytes of a dataset, apart from the corpus."""

    tokenizer: str
    end_of_text: int
    hold_out: float
    shard_size_bytes: int
    text_column: str
    libraries: str
    """Versions of tokenizers and zstandard."""
    chat: str
    """Checksum of an instruction dataset's template, document type and settings; else empty."""
    skip_invalid: bool
    document_limit_mib: int

    def differences(self, other: "Recipe", *, ignored: Container[str]) -> list[str]:
        """Describe the fields that differ from `other`, except those in `besides`."""
        return [
            f"{_NAMES.get(name, name)} is {getattr(other, name)!r}, was {getattr(self, name)!r}"
            for name in self.__struct_fields__
            if name not in ignored and getattr(self, name) != getattr(other, name)
        ]


class AnswerCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Answers in conversations or pairs; zeros for text."""

    trained_tokens: int = 0
    """Tokens with loss."""
    answers: int = 0
    """Runs of tokens with loss."""
    ended: int = 0
    """Answers whose last token is special, such as the end-of-text token."""

    def plus(self, other: "AnswerCounts") -> "AnswerCounts":
        """Return the sum of two counts."""
        return AnswerCounts(
            trained_tokens=self.trained_tokens + other.trained_tokens,
            answers=self.answers + other.answers,
            ended=self.ended + other.ended,
        )


class BuildProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a build through the corpus."""

    position: Position = Position()
    text_bytes: int = 0
    """UTF-8 bytes of the documents."""
    skipped: int = 0
    """Documents skipped because they are not valid text."""
    left_out: dict[str, int] = {}
    """Number of skipped non-text files, by file type."""
    empty: int = 0
    """Rows, lines and files without text."""
    answers: AnswerCounts = AnswerCounts()


class BuildJournal(msgspec.Struct, frozen=True, kw_only=True, tag="ms-data.journal.5"):
    """State of a build at a moment when everything it counts is synced to disk."""

    recipe: Recipe
    progress: BuildProgress
    files_read: str
    """Checksum of paths, sizes and times of the files read so far."""
    dataset: DatasetState

    def check(self, recipe: Recipe, source: Corpus, folder: Path) -> None:
        """Check that a build can resume from this state.

        Raises:
            OutputError: the build has other settings or another corpus; names the differences.
        """
        # Skipping invalid documents from here on, or a larger limit, changes no earlier document.
        ignored = "skip_invalid" if recipe.skip_invalid else "document_limit_mib"
        changes = self.recipe.differences(recipe, ignored=[ignored])
        if source.files_digest(self.progress.position.file + 1) != self.files_read:
            changes.append("the corpus has different files or content")
        if changes:
            raise OutputError(
                f"{folder} holds an interrupted build with different settings: "
                f"{'; '.join(changes)}; use the same settings, or remove the folder"
            )
