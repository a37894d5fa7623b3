"""The rows that each data rank takes of the global batch, by speeds that are measured as it runs.

A loss is divided once by its weight over the global batch, so no number depends on who computes
which rows but by rounding: only how long a step takes does.
"""

import heapq
from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist

from ms_parallel.events import OnEvent
from ms_parallel.training.checkpoints import Stream
from ms_parallel.training.shares.setting import Shares

WINDOW = 4
"""Updates between two looks at the speeds; the median of a rank's counts."""
WARM_UP = 1
"""Updates that are not counted when a run or new shares begin: they allocate and compile."""
GAIN = 0.05
"""Shares change where that makes a step this much shorter, so that noise does not move them."""
SLOW = 0.8
"""A rank is slow whose speed is below this part of the median rank's."""


class RowShares:
    """Which data rank takes how many rows, and what is known of their speeds.

    Args:
        setting: how rows are shared out.
        batch_size: rows of the global batch.
        rank: this process's data rank.
        count: data ranks.
        least: rows that each gets at any rate.
        emit: called with each change, on the first process.
    """

    def __init__(
        self,
        setting: Shares,
        batch_size: int,
        *,
        rank: int,
        count: int,
        least: int = 1,
        emit: OnEvent,
    ) -> None:
        self.measured = setting == "measured" and count > 1
        self.rank, self.batch_size, self.emit = rank, batch_size, emit
        self.least = min(least, batch_size // count)
        self.rows: tuple[int, ...] = (
            setting if isinstance(setting, tuple) else (batch_size // count,) * count
        )
        """Rows of each data rank."""
        self.speeds: tuple[float, ...] | None = None
        """Rows a second of each data rank, when they were last looked at."""
        self.history: list[tuple[float, ...]] = []
        """The speeds of all looks."""
        self._seconds: list[float] = []
        self._to_skip = WARM_UP

    def begin(self, stream: Stream, before: Sequence[int] = ()) -> None:
        """Share out the rows of a stream, as an interrupted run did where that still fits."""
        fits = len(before) == len(self.rows) and sum(before) == self.batch_size
        if self.measured and fits and min(before) >= 1:
            self.rows = tuple(before)
        if len(set(self.rows)) > 1:
            stream.share_out(self.rows)

    def rebalance(self, step: int, seconds: float, stream: Stream) -> bool:
        """Record the time of a step and reassign rows if that pays; all processes call it.

        Args:
            step: the update's.
            seconds: of its forwards and backwards, without waiting for other data ranks.
            stream: is shared out anew where that pays.

        Returns:
            Whether the shares have changed; the same on all processes.
        """
        if not self.measured:
            return False
        if self._to_skip:
            self._to_skip -= 1
            return False
        self._seconds.append(seconds)
        if len(self._seconds) < WINDOW:
            return False
        taken = self._meet(median(self._seconds))
        self._seconds = []
        self.speeds = tuple(rows / each for rows, each in zip(self.rows, taken, strict=True))
        self.history.append(self.speeds)
        wanted = share_out(self.batch_size, self.speeds, least=self.least)
        now, then = seconds_of(self.rows, self.speeds), seconds_of(wanted, self.speeds)
        if then > (1 - GAIN) * now:
            return False
        self.rows, self._to_skip = wanted, WARM_UP
        stream.share_out(wanted)
        self._log(step, now, then)
        return True

    def _meet(self, seconds: float) -> list[float]:
        """Exchange how long each data rank took: as long as the slowest of its processes."""
        every = torch.zeros(len(self.rows), dtype=torch.float64)
        every[self.rank] = max(seconds, 1e-9)
        dist.all_reduce(every, op=dist.ReduceOp.MAX)
        found: list[float] = every.tolist()
        return found

    def _log(self, step: int, now: float, then: float) -> None:
        assert self.speeds is not None
        self.emit(
            "shares",
            {
                "step": step,
                "step_s_before": round(now, 6),
                "step_s_after": round(then, 6),
                **{f"rows.{rank}": rows for rank, rows in enumerate(self.rows)},
                **{f"rows_per_s.{rank}": round(v, 3) for rank, v in enumerate(self.speeds)},
            },
        )

    @property
    def mean_speeds(self) -> tuple[float, ...] | None:
        """Rows a second of each data rank over the whole run; None where none was measured."""
        if not self.history:
            return None
        return tuple(sum(each) / len(each) for each in zip(*self.history, strict=True))

    @property
    def slow_ranks(self) -> tuple[int, ...]:
        """Data ranks that were slow by the median of the others."""
        speeds = self.mean_speeds or ()
        return tuple(
            rank
            for rank, speed in enumerate(speeds)
            if speed < SLOW * median(other for at, other in enumerate(speeds) if at != rank)
        )

    def changed(self) -> str:
        """Describe in a line the shares that have just changed: each data rank's rows and speed."""
        speeds = self.speeds or ()
        parts = [f"{rows} ({speed:.3g}/s)" for rows, speed in zip(self.rows, speeds, strict=True)]
        return f"rows of the data ranks by their speed: {', '.join(parts)}"

    def report(self) -> str | None:
        """Describe in a line the ranks that were slow; None where none was."""
        speeds, slow = self.mean_speeds, self.slow_ranks
        if speeds is None or not slow:
            return None
        parts = [
            f"data rank {rank} was slow: {speeds[rank]:.3g} rows/s, the fastest"
            f" {max(speeds):.3g}; it takes {self.rows[rank]} of {self.batch_size} rows"
            for rank in slow
        ]
        return "; ".join(parts)


def share_out(rows: int, speeds: Sequence[float], *, least: int = 1) -> tuple[int, ...]:
    """Share out rows to ranks such that the last one is done as early as can be.

    Each row goes to the rank that would be done with it first, the first of equals; no other way
    to share out whole rows ends earlier (Graham 1969, for jobs of equal length on machines of
    unequal speed).

    Args:
        rows: of the global batch.
        speeds: of each rank, in rows a second, all above 0.
        least: rows that each rank gets at any rate.
    """
    shares = [least] * len(speeds)
    done = [((least + 1) / speed, rank) for rank, speed in enumerate(speeds)]
    heapq.heapify(done)
    for _ in range(rows - least * len(speeds)):
        _, rank = done[0]
        shares[rank] += 1
        heapq.heapreplace(done, ((shares[rank] + 1) / speeds[rank], rank))
    return tuple(shares)


def seconds_of(shares: Sequence[int], speeds: Sequence[float]) -> float:
    """Return the seconds after which the last rank is done."""
    return max(rows / speed for rows, speed in zip(shares, speeds, strict=True))
