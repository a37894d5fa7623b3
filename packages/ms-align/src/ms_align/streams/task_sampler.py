"""Which task the next rows are of: probabilities that follow each task's complexity in training.

    q = floors + (1 - sum of floors) · r,    r_k ∝ base_k · complexity_k^(1 / temperature)

`base` is how often a task would come by itself, `complexity` what `signal` measures. A row of task
k then weighs (base_k / q_k)^correction. With correction 1 and a divisor that doesn't depend on the
draw (`SFTLoss(per_row=True)`), the expected gradient is exactly that of drawing by `base`, whatever
q is: sum_k q_k · (base_k / q_k) · g_k = sum_k base_k · g_k. With 0, harder tasks count for more.

Rows are drawn systematically: one uniform number u picks the rows at (u + i) / rows of the
cumulated probabilities, so task k gets the whole number below or above rows · q_k, on average
exactly that, with less noise than independent draws (Kitagawa, 1996).
"""

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from attrs import field, frozen

from ms_align.errors import CheckpointError, ConfigError
from ms_align.settings import number, numbers, one_of, whole
from ms_align.settings.run_file import table_of

SMALLEST = 1e-6
"""Complexities are at least this, so that no task is lost for good."""


@frozen(kw_only=True)
class TaskOptions:
    """How tasks are sampled."""

    signal: Literal["loss", "progress", "given"] = field(
        default="loss", validator=one_of("loss", "progress", "given")
    )
    """What complexity is: the task's smoothed loss; how fast that falls; or given numbers."""
    given: Mapping[str, float] = field(factory=dict, validator=numbers())
    """With `signal="given"`: the complexity of each task."""
    base: Mapping[str, float] = field(factory=dict, validator=numbers())
    """How often each task would come by itself, in ratios; empty for all alike."""
    temperature: float = field(default=1.0, validator=number(least=1e-3))
    """Below 1 the hardest tasks take more, above 1 all come closer to `base`."""
    floor: float = field(default=0.05, validator=number(below=1.0))
    """Least probability of a task, as a share of 1 / (number of tasks)."""
    correction: float = field(default=0.0, validator=number(most=1.0))
    """1 makes the expected gradient that of `base`; 0 lets hard tasks count for more."""
    smoothing: float = field(default=0.9, validator=number(below=1.0))
    """Share of the old smoothed loss that an update keeps."""
    slow_smoothing: float = field(default=0.98, validator=number(below=1.0))
    """With `signal="progress"`: that share for the loss it is compared with."""
    warmup_steps: int = field(default=10, validator=whole(least=0))
    """Updates that are drawn by `base`, until losses are known."""


def task_options(value: Any) -> TaskOptions | None:
    """Convert what a setting `tasks` holds: options, a table of them, or None.

    Raises:
        ConfigError: it is none of these.
    """
    return None if value is None else table_of(TaskOptions, "tasks")(value)


class TaskSampler:
    """Draws the tasks of each update's rows.

    Args:
        names: the tasks, as `task` in a batch counts them.
        options: how.
        seed: of the random numbers.

    Raises:
        ConfigError: names in the options are not those of the tasks.
    """

    def __init__(self, names: Sequence[str], options: TaskOptions, *, seed: int = 0) -> None:
        self.names = tuple(names)
        self.options = options
        self.seed = seed
        self.step = 0
        """Updates observed so far."""
        self.fast: list[float | None] = [None] * len(self.names)
        """Smoothed loss of each task; None before it came once."""
        self.slow: list[float | None] = [None] * len(self.names)
        self.base = _shares(self.names, options.base or dict.fromkeys(names, 1.0), "base")
        if options.signal == "given":
            _shares(self.names, options.given, "given")

    def complexities(self) -> list[float]:
        """Compute what the signal measures now, at least a millionth; 1 for all in the warm-up."""
        if self.options.signal == "given":
            return [max(float(self.options.given[name]), SMALLEST) for name in self.names]
        known = [one for one in self.fast if one is not None]
        if self.step < self.options.warmup_steps or not known:
            return [1.0] * len(self.names)
        if self.options.signal == "loss":
            unknown = sum(known) / len(known)
            return [max(unknown if one is None else one, SMALLEST) for one in self.fast]
        rates = [
            None if fast is None or slow is None else abs(slow - fast) / max(slow, SMALLEST)
            for fast, slow in zip(self.fast, self.slow, strict=True)
        ]
        seen = [rate for rate in rates if rate is not None]
        return [max(max(seen) if rate is None else rate, SMALLEST) for rate in rates]

    def probabilities(self) -> list[float]:
        """Compute the probability of each task now; they sum to 1."""
        powers = [one ** (1.0 / self.options.temperature) for one in self.complexities()]
        wanted = [base * power for base, power in zip(self.base, powers, strict=True)]
        total, floor = sum(wanted), self.options.floor / len(self.names)
        if not 0.0 < total < math.inf:  # powers of a low temperature may leave what floats hold
            wanted, total = list(self.base), 1.0
        live = sum(1 for base in self.base if base > 0)
        spare = 1.0 - floor * live
        return [
            (floor + spare * one / total) if base > 0 else 0.0
            for base, one in zip(self.base, wanted, strict=True)
        ]

    def draw(self, rows: int) -> tuple[list[int], list[float]]:
        """Draw the tasks of the next rows, and compute the importance weight of each row.

        The same step and losses give the same draw, on every process.
        """
        probabilities = self.probabilities()
        # A text as seed is hashed, the same on every machine and in every version of Python.
        start = random.Random(f"ms-align tasks {self.seed} {self.step}").random()
        tasks = systematic(probabilities, rows, start)
        return tasks, [self.importance(task, probabilities) for task in tasks]

    def importance(self, task: int, probabilities: Sequence[float]) -> float:
        """Compute the weight of a row of `task` that was drawn with these probabilities."""
        return float((self.base[task] / probabilities[task]) ** self.options.correction)

    def observe(self, losses: Sequence[float | None]) -> None:
        """Take in an update's mean loss of each task; None where none of its rows was drawn."""
        for smoothed, keep in (
            (self.fast, self.options.smoothing),
            (self.slow, self.options.slow_smoothing),
        ):
            for task, loss in enumerate(losses):
                if loss is not None and math.isfinite(loss):
                    before = smoothed[task]
                    smoothed[task] = loss if before is None else keep * before + (1 - keep) * loss
        self.step += 1

    def state(self) -> dict[str, Any]:
        """Return what the sampler needs to go on, as a few JSON values."""
        return {
            "names": list(self.names),
            "step": self.step,
            "fast": list(self.fast),
            "slow": list(self.slow),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`.

        Raises:
            CheckpointError: it is of other tasks.
        """
        if tuple(state["names"]) != self.names:
            raise CheckpointError(
                f"the sampler's state is of the tasks {state['names']}, this run has "
                f"{list(self.names)}; choose another output_dir"
            )
        self.step = int(state["step"])
        self.fast, self.slow = list(state["fast"]), list(state["slow"])


def systematic(probabilities: Sequence[float], rows: int, start: float) -> list[int]:
    """Give the tasks at (start + i) / rows of the cumulated probabilities, for each row i.

    `start` is from 0, below 1.
    """
    tasks, task, reached = [], 0, probabilities[0]
    last = max(at for at, one in enumerate(probabilities) if one > 0)
    for row in range(rows):
        while (start + row) / rows >= reached and task < last:
            task += 1
            reached += probabilities[task]
        tasks.append(task)
    return tasks


def _shares(names: Sequence[str], given: Mapping[str, float], what: str) -> list[float]:
    if set(given) != set(names):
        raise ConfigError(
            f"{what} is for {sorted(given)}; give a number for each task: {sorted(names)}"
        )
    values = [given[name] for name in names]
    if not all(isinstance(one, int | float) and 0 <= one < math.inf for one in values):
        raise ConfigError(f"{what} is {dict(given)}; give numbers of 0 or more")
    total = sum(values)
    if total <= 0:
        raise ConfigError(f"{what} is {dict(given)}; at least one must be above 0")
    return [one / total for one in values]
