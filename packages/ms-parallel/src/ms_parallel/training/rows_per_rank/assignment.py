"""Assigns rows of the global batch to data ranks, by fixed numbers or by measured speed.

The loss is normalized once over the global batch, so the assignment changes results only by
rounding, and otherwise only the step time.
"""

import heapq
from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist

from ms_parallel.events import OnEvent
from ms_parallel.training.checkpoints import Stream
from ms_parallel.training.rows_per_rank.setting import RowsPerRank

WINDOW = 4
"""Steps between rebalancing; the median step time of each rank counts."""
WARM_UP = 1
"""Steps to ignore after the start or a new assignment: they allocate and compile."""
GAIN = 0.05
"""Minimum relative reduction of the step time for a new assignment, to ignore noise."""
SLOW = 0.8
"""A rank is slow if its speed is below this fraction of the median of the others."""


class RowAssignment:
    """Rows per data rank, and the measured speed of each.

    Args:
        setting: the setting `shares`.
        batch_size: rows of the global batch.
        rank: this process's data rank.
        count: number of data ranks.
        minimum: minimum rows per rank.
        emit: called with each change, on rank 0.
    """

    def __init__(
        self,
        setting: RowsPerRank,
        batch_size: int,
        *,
        rank: int,
        count: int,
        minimum: int = 1,
        emit: OnEvent,
    ) -> None:
        self.measured = setting == "measured" and count > 1
        self.rank, self.batch_size, self.emit = rank, batch_size, emit
        # An equal split must stay possible.
        self.minimum = min(minimum, batch_size // count)
        self.rows: tuple[int, ...] = (
            setting if isinstance(setting, tuple) else (batch_size // count,) * count
        )
        """Rows of each data rank."""
        self.speeds: tuple[float, ...] | None = None
        """Rows per second of each data rank at the last rebalancing."""
        self.history: list[tuple[float, ...]] = []
        """Speeds at all rebalancings."""
        self._seconds: list[float] = []
        self._to_skip = WARM_UP

    def begin(self, stream: Stream, previous: Sequence[int] = ()) -> None:
        """Assign the rows of a stream; resume a previous assignment if it still fits."""
        fits = len(previous) == len(self.rows) and sum(previous) == self.batch_size
        if self.measured and fits and min(previous) >= 1:
            self.rows = tuple(previous)
        if len(set(self.rows)) > 1:
            stream.share_out(self.rows)

    def rebalance(self, step: int, seconds: float, stream: Stream) -> bool:
        """Record the time of a step and reassign rows if that pays. Collective.

        Args:
            step: number of the step.
            seconds: forward and backward time, without waiting for other data ranks.
            stream: stream whose rows are reassigned.

        Returns:
            Whether the assignment has changed; the same on all processes.
        """
        if not self.measured:
            return False
        if self._to_skip:
            self._to_skip -= 1
            return False
        self._seconds.append(seconds)
        if len(self._seconds) < WINDOW:
            return False
        # The median ignores a single slow step; all ranks then compute the same assignment.
        rank_seconds = self._exchange_seconds(median(self._seconds))
        self._seconds = []
        self.speeds = tuple(
            rows / duration for rows, duration in zip(self.rows, rank_seconds, strict=True)
        )
        self.history.append(self.speeds)
        assignment = assign_rows(self.batch_size, self.speeds, minimum=self.minimum)
        seconds_now, seconds_after = (
            step_seconds(self.rows, self.speeds),
            step_seconds(assignment, self.speeds),
        )
        if seconds_after > (1 - GAIN) * seconds_now:  # too small a gain to be more than noise
            return False
        self.rows, self._to_skip = assignment, WARM_UP
        stream.share_out(assignment)
        self._log(step, seconds_now, seconds_after)
        return True

    def _exchange_seconds(self, seconds: float) -> list[float]:
        """All-reduce the step times: each data rank takes as long as its slowest process."""
        durations = torch.zeros(len(self.rows), dtype=torch.float64)
        # Other ranks' entries stay 0, so the maximum is over the processes of each data rank.
        durations[self.rank] = max(seconds, 1e-9)
        dist.all_reduce(durations, op=dist.ReduceOp.MAX)
        result: list[float] = durations.tolist()
        return result

    def _log(self, step: int, seconds_now: float, seconds_after: float) -> None:
        assert self.speeds is not None
        self.emit(
            "shares",
            {
                "step": step,
                "step_s_before": round(seconds_now, 6),
                "step_s_after": round(seconds_after, 6),
                **{f"rows.{rank}": rows for rank, rows in enumerate(self.rows)},
                **{f"rows_per_s.{rank}": round(v, 3) for rank, v in enumerate(self.speeds)},
            },
        )

    @property
    def mean_speeds(self) -> tuple[float, ...] | None:
        """Mean rows per second of each data rank over the run; None if not measured."""
        if not self.history:
            return None
        return tuple(sum(values) / len(values) for values in zip(*self.history, strict=True))

    @property
    def slow_ranks(self) -> tuple[int, ...]:
        """Data ranks that were slow compared with the median of the others."""
        speeds = self.mean_speeds or ()
        return tuple(
            rank
            for rank, speed in enumerate(speeds)
            if speed < SLOW * median(peer for index, peer in enumerate(speeds) if index != rank)
        )

    def changed(self) -> str:
        """Describe the new assignment: rows and speed of each data rank."""
        speeds = self.speeds or ()
        parts = [f"{rows} ({speed:.3g}/s)" for rows, speed in zip(self.rows, speeds, strict=True)]
        return f"rows of the data ranks by their speed: {', '.join(parts)}"

    def report(self) -> str | None:
        """Describe the slow ranks in one line; None without slow ranks."""
        speeds, slow = self.mean_speeds, self.slow_ranks
        if speeds is None or not slow:
            return None
        parts = [
            f"data rank {rank} was slow: {speeds[rank]:.3g} rows/s, the fastest"
            f" {max(speeds):.3g}; it takes {self.rows[rank]} of {self.batch_size} rows"
            for rank in slow
        ]
        return "; ".join(parts)


def assign_rows(rows: int, speeds: Sequence[float], *, minimum: int = 1) -> tuple[int, ...]:
    """Assign rows to ranks so that the slowest rank finishes as early as possible.

    Each row goes to the rank that would finish it first (the lowest rank on ties). This greedy rule
    is optimal for jobs of equal length on machines of different speed (Graham 1969).

    Args:
        rows: rows of the global batch.
        speeds: rows per second of each rank, above 0.
        minimum: minimum rows per rank.
    """
    shares = [minimum] * len(speeds)
    # (finish time with one more row, rank)
    finish = [((minimum + 1) / speed, rank) for rank, speed in enumerate(speeds)]
    heapq.heapify(finish)
    for _ in range(rows - minimum * len(speeds)):
        _, rank = finish[0]
        shares[rank] += 1
        heapq.heapreplace(finish, ((shares[rank] + 1) / speeds[rank], rank))
    return tuple(shares)


def step_seconds(shares: Sequence[int], speeds: Sequence[float]) -> float:
    """Seconds until the slowest rank finishes."""
    return max(rows / speed for rows, speed in zip(shares, speeds, strict=True))
