"""What trainers ask of their data, and the checks that data and engine fit each other."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from ms_align.engines.protocol import Engine
from ms_align.errors import DataError, ModelError
from ms_align.tokenizer_files import TokenizerFiles, check_same_tokenizer, files_of

HeldOut = Callable[[], Iterable[Mapping[str, Any]]]
"""Makes an iterator of held-out batches, each process its rows; read to its end each time."""


@runtime_checkable
class Stream(Protocol):
    """Batches, and where they stand; `ms_data.InstructionStream` and `PreferenceStream` are two."""

    def __next__(self) -> Mapping[str, Any]:
        """Return this process's rows of the next global batch."""

    def state_dict(self) -> dict[str, Any]:
        """Return the stream's place as JSON values, the same on every process."""

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Go to where the state was taken."""


@runtime_checkable
class TaskStream(Protocol):
    """A stream of several tasks that gives rows of those asked for."""

    @property
    def names(self) -> tuple[str, ...]:
        """The tasks; `task` in a batch counts them from 0."""

    @property
    def batch_size(self) -> int:
        """Rows in a global batch."""

    def of_tasks(self, tasks: Sequence[int], /) -> Mapping[str, Any]:
        """Return a global batch whose rows are of these tasks."""


def check_fit(engine: Engine, stream: object, what: str) -> None:
    """Refuse data whose tokens or rows the model cannot take.

    Raises:
        ModelError: the data was built for another vocabulary, or its rows are longer than the
            model's context.
    """
    tokens, rows = (getattr(stream, name, None) for name in ("vocabulary_size", "sequence_length"))
    vocabulary, context = engine.vocabulary_size, engine.context
    if tokens is not None and vocabulary is not None and tokens > vocabulary:
        raise ModelError(
            f"{what}: tokenizer and model disagree: its tokens go up to {tokens - 1}, the model "
            f"knows {vocabulary}; build the data with the model's own tokenizer"
        )
    if rows is not None and context is not None and rows > context:
        raise ModelError(
            f"{what}: rows of {rows} tokens are longer than the model's context of {context}; "
            f"set sequence_length to {context} or less"
        )


def check_tokenizers(tokenizer: TokenizerFiles | None, model: str, stream: object) -> None:
    """Refuse data that was built with another tokenizer than the model's.

    Args:
        tokenizer: the model's own; None is not compared.
        model: the model's name in the message.
        stream: training data; a stream that names no `folders` is not compared.

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
    """Take the next batch of a stream that must not end.

    Raises:
        DataError: it has ended, or is empty.
    """
    try:
        return next(stream)
    except StopIteration:
        raise DataError(
            "the data ended before the run's steps; make its stream without `epochs`, or lower "
            "steps"
        ) from None
