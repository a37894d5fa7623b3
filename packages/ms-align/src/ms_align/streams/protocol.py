"""Stream protocols, and checks that data and model match."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from ms_align.engines.protocol import Engine
from ms_align.errors import DataError, ModelError
from ms_align.tokenizer_files import TokenizerFiles, check_same_tokenizer, files_of

HeldOut = Callable[[], Iterable[Mapping[str, Any]]]
"""Function that returns an iterator over held-out batches, this rank's rows; read to the end."""


@runtime_checkable
class Stream(Protocol):
    """Resumable stream of batches, such as `ms_data.InstructionStream` or `PreferenceStream`."""

    def __next__(self) -> Mapping[str, Any]:
        """Return this process's rows of the next global batch."""

    def state_dict(self) -> dict[str, Any]:
        """Return the stream's position as JSON values, the same on every process."""

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Restore a position."""


@runtime_checkable
class TaskStream(Protocol):
    """Stream of several tasks that can return rows of requested tasks."""

    @property
    def names(self) -> tuple[str, ...]:
        """Task names; `task` in a batch is an index into them."""

    @property
    def batch_size(self) -> int:
        """Rows per global batch."""

    def of_tasks(self, tasks: Sequence[int], /) -> Mapping[str, Any]:
        """Return a global batch, one row per requested task."""


def check_fit(engine: Engine, stream: object, label: str) -> None:
    """Check that the model supports the tokens and rows of the data.

    Raises:
        ModelError: the data has a larger vocabulary than the model, or rows longer than its
            context.
    """
    tokens, rows = (getattr(stream, name, None) for name in ("vocabulary_size", "sequence_length"))
    vocabulary, context = engine.vocabulary_size, engine.context
    if tokens is not None and vocabulary is not None and tokens > vocabulary:
        raise ModelError(
            f"{label}: tokenizer and model disagree: token ids go up to {tokens - 1}, and the "
            f"model has {vocabulary}; build the data with the model's tokenizer"
        )
    if rows is not None and context is not None and rows > context:
        raise ModelError(
            f"{label}: rows of {rows} tokens are longer than the model's context of {context}; "
            f"set sequence_length to {context} or less"
        )


def check_tokenizers(tokenizer: TokenizerFiles | None, model: str, stream: object) -> None:
    """Check that the data was built with the model's tokenizer.

    Args:
        tokenizer: the model's tokenizer; None skips the check.
        model: name of the model, for messages.
        stream: training data; a stream without `folders` is not checked.

    Raises:
        ModelError: the tokenizers differ.
    """
    for folder in getattr(stream, "folders", ()):
        check_same_tokenizer(
            tokenizer,
            model,
            files_of(folder),
            str(folder),
            remedy="build the data with the model's tokenizer",
        )


def next_batch(stream: Stream) -> Mapping[str, Any]:
    """Return the next batch of an endless stream.

    Raises:
        DataError: the stream has ended or is empty.
    """
    try:
        return next(stream)
    except StopIteration:
        raise DataError(
            "the data ended before the last step; create its stream without `epochs`, or lower "
            "steps"
        ) from None
