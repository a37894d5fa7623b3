"""Base class of all streams: rows per rank, settings, and saved states."""

import operator
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, Self, TypeVar

from attrs import frozen

from ms_data.arguments import check_type, shown
from ms_data.errors import SettingError, StateError
from ms_data.settings.arguments import check_counts, check_flags, check_strings, is_integer

STATE_VERSION = 2

B = TypeVar("B")
T = TypeVar("T")


class StreamPlace(Protocol):
    """Rank of this process among the processes that share every global batch."""

    @property
    def rank(self) -> int:
        """Rank of this process, from 0."""
        ...

    @property
    def count(self) -> int:
        """Number of processes."""
        ...


@frozen
class RankRows:
    """The rows of every global batch that one process receives."""

    rank: int
    count: int
    rows: int
    """Number of rows (or pairs) of this process."""
    first: int
    """Index of its first row in the global batch."""

    @classmethod
    def at(cls, place: StreamPlace | None, batch_size: int) -> "RankRows":
        """Return the rows of the process at `place`; None selects all rows.

        Raises:
            SettingError: the rank is out of range, or the batch size is not a multiple of the
                number of processes.
        """
        check_counts(batch_size=batch_size)
        rank, count = 0, 1
        if place is not None:
            try:
                rank, count = place.rank, place.count
            except AttributeError:
                raise SettingError(
                    f"place must have `rank` and `count`, got {shown(place)}; pass the `place` of"
                    " an engine, or None to read all rows"
                ) from None
        if not (is_integer(rank) and is_integer(count) and 0 <= rank < count):
            raise SettingError(
                f"place: rank must be 0 to count - 1, got {shown(rank)} of {shown(count)}"
            )
        if batch_size % count:
            raise SettingError(
                f"batch_size {batch_size} cannot be divided among {count} ranks; "
                f"use a multiple of {count}"
            )
        rows = operator.index(batch_size) // count  # equal shares; `share_out` can change them
        return cls(rank, count, rows, rank * rows)

    def with_row_counts(self, shares: Sequence[int], batch_size: int) -> "RankRows":
        """Return this process's rows if every process takes the given number of rows.

        Raises:
            SettingError: there is not one number per process, or they do not sum to the batch size.
        """
        check_type("shares", shares, Sequence, "a list of integers", error=SettingError)
        for row_count in shares:
            if not is_integer(row_count):
                raise SettingError(f"shares must contain only integers, got {shown(row_count)}")
        rows = [operator.index(row_count) for row_count in shares]
        if len(rows) != self.count or min(rows) < 1 or sum(rows) != batch_size:
            raise SettingError(
                f"shares {rows} do not divide batch_size {batch_size} among {self.count} ranks;"
                " use one number of at least 1 per rank, summing to batch_size"
            )
        return RankRows(self.rank, self.count, rows[self.rank], sum(rows[: self.rank]))

    def of(self, rows: Sequence[T]) -> Sequence[T]:
        """Select this process's rows of a global batch."""
        return rows[self.first : self.first + self.rows]


class BatchStream(Iterator[B]):
    """A stream of global batches that can save and restore its position.

    Subclasses add to `_settings`, and convert their position to and from JSON values.
    """

    def __init__(
        self,
        *,
        sequence_length: int,
        batch_size: int,
        seed: int,
        place: StreamPlace | None,
        split: str,
        shuffle: bool,
        epochs: int | None,
    ) -> None:
        check_counts(sequence_length=sequence_length)
        if epochs is not None:
            check_counts(epochs=epochs)
        check_flags(shuffle=shuffle)
        check_strings(split=split)
        if not is_integer(seed):
            raise SettingError(f"seed must be an integer, got {shown(seed)}")
        self._rank_rows = RankRows.at(place, batch_size)
        self.sequence_length = operator.index(sequence_length)
        self.batch_size = operator.index(batch_size)
        self._settings: dict[str, Any] = {
            "split": split,
            "sequence_length": self.sequence_length,
            "seed": operator.index(seed),
            "shuffle": bool(shuffle),
        }
        """Everything that determines the order of the samples."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Hash that identifies the content of the data."""

    def _identify_by_fingerprint(self) -> None:
        """Identify the data in saved states by its fingerprint instead of by folder names."""
        self._settings = {"dataset": self.fingerprint, **self._settings}

    def __iter__(self) -> Self:
        return self

    def share_out(self, shares: Sequence[int]) -> None:
        """Set the number of rows of the following global batches that every process receives.

        All processes must pass the same numbers. The content and order of global batches and the
        saved states do not change, only which process reads which rows.

        Args:
            shares: rows (or pairs) per process, in the order of ranks.

        Raises:
            SettingError: there is not one number per process, or they do not sum to the batch size.
        """
        self._rank_rows = self._rank_rows.with_row_counts(shares, self.batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON values, identical in all processes."""
        return {"version": STATE_VERSION, "settings": self._settings, **self._position()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position; the batch size and the number of processes may differ.

        Raises:
            StateError: the state belongs to other data or settings; names the difference.
        """
        check_type("state", state, Mapping, "a result of state_dict()", error=StateError)
        if state.get("version") != STATE_VERSION:
            raise StateError(
                f"stream state has version {state.get('version')!r}, this ms-data reads "
                f"{STATE_VERSION}; resume with the ms-data that wrote it"
            )
        settings = state.get("settings")
        # Batch size and number of processes are not among these, so both may change on resume.
        for name, value in self._settings.items():
            saved = settings.get(name) if isinstance(settings, Mapping) else None
            if saved != value:
                raise StateError(
                    f"stream state has {name} {saved!r}, this stream has {value!r}; "
                    "use the same settings, or start without the state"
                )
        # A failed load must leave the stream usable.
        old_position = self._position()
        try:
            with state_errors():
                self._restore_position(state)
        except StateError:
            self._restore_position(old_position)
            raise

    @abstractmethod
    def _position(self) -> dict[str, Any]:
        """Return the position as JSON values."""

    @abstractmethod
    def _restore_position(self, position: Mapping[str, Any]) -> None:
        """Restore a position; raise ValueError or a similar error if it is invalid."""


@contextmanager
def state_errors(label: str = "stream state") -> Iterator[None]:
    """Convert the errors that a damaged state causes to StateError."""
    try:
        yield
    except StateError:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise StateError(f"{label} is damaged: {error}") from error


def read_count(value: Any) -> int:
    """Return a JSON value that must be an integer of 0 or more.

    Raises:
        ValueError: it is not.
    """
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def read_bool(value: Any) -> bool:
    """Return a JSON value that must be true or false.

    Raises:
        ValueError: it is neither.
    """
    if type(value) is not bool:
        raise ValueError(f"{value!r} is neither true nor false")
    return value
