"""Shares a batch among processes, and checks the settings and states of all streams."""

import operator
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, Self, TypeVar

from attrs import frozen

from ms_data.errors import SettingError, StateError
from ms_data.settings.arguments import check_counts, check_flags, check_texts, is_whole

STATE_VERSION = 2

B = TypeVar("B")
T = TypeVar("T")


class StreamPlace(Protocol):
    """Where a process stands among those that share each global batch."""

    @property
    def rank(self) -> int:
        """This process, from 0."""
        ...

    @property
    def count(self) -> int:
        """How many processes there are."""
        ...


@frozen
class Share:
    """The part of each global batch that one process receives."""

    rank: int
    count: int
    rows: int
    """Rows, or pairs, of a global batch that are its own."""
    first: int
    """The first of them."""

    @classmethod
    def at(cls, place: StreamPlace | None, batch_size: int) -> "Share":
        """Compute the share of the process at `place`; None takes whole batches.

        Raises:
            SettingError: the rank is not one of the processes, or they cannot share evenly.
        """
        check_counts(batch_size=batch_size)
        rank, count = (place.rank, place.count) if place else (0, 1)
        if not (is_whole(rank) and is_whole(count) and 0 <= rank < count):
            raise SettingError(f"place: rank {rank!r} is not one of {count!r}, from 0 on")
        if batch_size % count:
            raise SettingError(
                f"batch_size {batch_size} cannot be shared by {count} ranks; "
                f"take a multiple of {count}"
            )
        rows = operator.index(batch_size) // count
        return cls(rank, count, rows, rank * rows)

    def among(self, shares: Sequence[int], batch_size: int) -> "Share":
        """Compute this process's share where each takes as many rows as `shares` says.

        Raises:
            SettingError: they are not a share for each process, or do not make up the batch.
        """
        rows = [operator.index(each) for each in shares]
        if len(rows) != self.count or min(rows) < 1 or sum(rows) != batch_size:
            raise SettingError(
                f"shares {rows} do not share out batch_size {batch_size} over {self.count} ranks;"
                " give each of them at least 1 row, and all rows"
            )
        return Share(self.rank, self.count, rows[self.rank], sum(rows[: self.rank]))

    def of(self, rows: Sequence[T]) -> Sequence[T]:
        """Take the rows of a global batch that are this process's own."""
        return rows[self.first : self.first + self.rows]


class BatchStream(Iterator[B]):
    """A stream of global batches that can save its position and resume from it.

    A subclass adds to `_settings`, and gives and takes its position in JSON values.
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
        check_counts(sequence_length=sequence_length, epochs=epochs)
        check_flags(shuffle=shuffle)
        check_texts(split=split)
        if not is_whole(seed):
            raise SettingError(f"seed must be a whole number, got {seed!r}")
        self._share = Share.at(place, batch_size)
        self.sequence_length = operator.index(sequence_length)
        self.batch_size = operator.index(batch_size)
        self._settings: dict[str, Any] = {
            "split": split,
            "sequence_length": self.sequence_length,
            "seed": operator.index(seed),
            "shuffle": bool(shuffle),
        }
        """All that decides which samples come when."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Name the data by its content."""

    def _is_of_one_dataset(self) -> None:
        """Let a state name the data as a dataset's, whatever its folder is called."""
        self._settings = {"dataset": self.fingerprint, **self._settings}

    def __iter__(self) -> Self:
        return self

    def share_out(self, shares: Sequence[int]) -> None:
        """Give each process as many rows of the global batches that follow as `shares` says.

        Every process gives the same. What the batches hold, their order and the states stay what
        they are: only who reads which of their rows changes.

        Args:
            shares: rows, or pairs, of each process in the order of ranks.

        Raises:
            SettingError: they are not a share for each process, or do not make up the batch.
        """
        self._share = self._share.among(shares, self.batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Return where the stream stands: JSON values, the same in every process."""
        return {"version": STATE_VERSION, "settings": self._settings, **self._position()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where `state` was taken; batch size and number of processes may differ.

        Raises:
            StateError: the state is of other data or other settings; names what differs.
        """
        if state.get("version") != STATE_VERSION:
            raise StateError(
                f"stream state has version {state.get('version')!r}, this ms-data reads "
                f"{STATE_VERSION}; resume with the ms-data that wrote it"
            )
        settings = state.get("settings")
        for name, value in self._settings.items():
            given = settings.get(name) if isinstance(settings, Mapping) else None
            if given != value:
                raise StateError(
                    f"stream state has {name} {given!r} where this stream has {value!r}; "
                    "make the stream as it was, or start it anew"
                )
        before = self._position()
        try:
            with reading_state():
                self._go_to(state)
        except StateError:
            self._go_to(before)
            raise

    @abstractmethod
    def _position(self) -> dict[str, Any]:
        """Return where the stream stands, in JSON values."""

    @abstractmethod
    def _go_to(self, position: Mapping[str, Any]) -> None:
        """Go to a position; raise ValueError or the like for one that cannot be."""


@contextmanager
def reading_state(what: str = "stream state") -> Iterator[None]:
    """Turn whatever a damaged state makes its reader raise into a StateError."""
    try:
        yield
    except StateError:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise StateError(f"{what} is damaged: {error}") from error


def count(value: Any) -> int:
    """Read a whole number of 0 or more from its JSON value.

    Raises:
        ValueError: it is not one.
    """
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def truth(value: Any) -> bool:
    """Read true or false from its JSON value.

    Raises:
        ValueError: it is neither.
    """
    if type(value) is not bool:
        raise ValueError(f"{value!r} is neither true nor false")
    return value
