"""A thread reads ahead the same batches as the stream, and runs resume exactly."""

import random
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from ms_parallel.training.read_ahead import ReadAhead


class Numbers:
    """A stream of numbers below `stop`; rank 0 gets the first `rows` of each ten numbers."""

    def __init__(self, stop: int = 1000, *, damaged: int | None = None) -> None:
        self.position, self.rows = 0, 5
        self.stop, self.damaged = stop, damaged
        self.reads = threading.Semaphore(0)
        self.history: list[int] = [0]

    def __next__(self) -> Mapping[str, Any]:
        if self.position >= self.stop:
            raise StopIteration
        if self.position == self.damaged:
            raise OSError("frame 7 is damaged")
        batch = {"tokens": list(range(self.position, self.position + self.rows))}
        self.position += 10
        self.history[0] = self.position  # shared with the states that were returned before
        self.reads.release()
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position, in a list that later reads change."""
        return {"position": self.history}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Restore the position."""
        (self.position,) = state["position"]
        self.history = [self.position]

    def share_out(self, shares: Sequence[int], /) -> None:
        """Set the rows of rank 0."""
        self.rows = shares[0]


def take(stream: Any, count: int) -> list[Any]:
    """Take batches, each with the state after it."""
    return [(next(stream), [*stream.state_dict()["position"]]) for _ in range(count)]


def test_batches_and_positions_are_those_of_the_stream() -> None:
    """After any mixture of batches, resumptions and new assignments of rows."""
    numbers = random.Random(0)
    for _ in range(20):
        plain, ahead = Numbers(), ReadAhead(Numbers(), pin=False, depth=numbers.randint(1, 4))
        saved = plain.state_dict()
        for _ in range(8):
            count = numbers.randint(0, 5)
            assert take(ahead, count) == take(plain, count)
            match numbers.choice(("share", "save", "load", "resume")):
                case "share":
                    rows = numbers.randint(1, 9)
                    plain.share_out([rows])
                    ahead.share_out([rows])
                case "save":
                    saved = ahead.state_dict()
                    assert saved == plain.state_dict()
                case "load":
                    plain.load_state_dict(saved)
                    ahead.load_state_dict(saved)
                case "resume":  # in another process
                    state, rows = ahead.state_dict(), plain.rows
                    ahead.close()
                    ahead = ReadAhead(Numbers(), pin=False)
                    ahead.load_state_dict(state)
                    ahead.share_out([rows])
        ahead.close()


def test_two_batches_are_read_ahead() -> None:
    """Slow steps do not let memory grow."""
    stream = Numbers()
    ahead = ReadAhead(stream, pin=False)
    for count in range(1, 4):
        next(ahead)
        for _ in range(3 if count == 1 else 1):
            assert stream.reads.acquire(timeout=60)
        assert not stream.reads.acquire(timeout=0.05)
        assert stream.position == 10 * (count + 2)
    ahead.close()
    assert stream.position == 30


def test_an_error_is_raised_at_its_batch_and_again_after_it() -> None:
    """Batches before a damaged one are trained on, and the position is before the damaged one."""
    ahead = ReadAhead(Numbers(damaged=20), pin=False)
    assert [batch["tokens"][0] for batch, _ in take(ahead, 2)] == [0, 10]
    for _ in range(2):
        with pytest.raises(OSError, match="frame 7"):
            next(ahead)
        assert ahead.state_dict() == {"position": [20]}
    ended = ReadAhead(Numbers(stop=10), pin=False)
    next(ended)
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(ended)


def test_closing_ends_the_thread() -> None:
    """Also while it waits for a free place."""
    ahead = ReadAhead(Numbers(), pin=False)
    next(ahead)
    threads = [thread for thread in threading.enumerate() if thread.name == "read-ahead"]
    assert len(threads) == 1
    ahead.close()
    assert not threads[0].is_alive()
    ahead.close()
