"""Task sampling by difficulty.

    q = floors + (1 - sum of floors) · r,    r_k ∝ base_k · complexity_k^(1 / temperature)

`base` are the tasks' natural frequencies, and `complexity` is measured by `signal`. A row of task k
has the weight (base_k / q_k)^correction. With correction 1 and a divisor that doesn't depend on the
sampled rows (`SFTLoss(per_row=True)`), the expected gradient equals that of sampling by `base`, for
any q: sum_k q_k · (base_k / q_k) · g_k = sum_k base_k · g_k. With 0, harder tasks count more.

Rows are sampled systematically: one uniform number u selects the rows at (u + i) / rows of the
cumulative probabilities, so task k gets floor or ceil of rows · q_k rows, on average exactly
rows · q_k, with less noise than independent sampling (Kitagawa, 1996).
"""

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from attrs import field, frozen

from ms_align.errors import CheckpointError, ConfigError
from ms_align.settings import integer, number, numbers, one_of
from ms_align.settings.run_file import table_of
from ms_align.used_settings import UsedIf, check_used

MIN_COMPLEXITY = 1e-6
"""Lower bound of complexities, so that every task keeps a nonzero probability."""


@frozen(kw_only=True)
class TaskOptions:
    """Task sampling."""

    signal: Literal["loss", "progress", "given"] = field(
        default="loss", validator=one_of("loss", "progress", "given")
    )
    """Complexity of a task: its smoothed loss, the rate at which it falls, or given numbers."""
    given: Mapping[str, float] = field(factory=dict, validator=numbers())
    """With `signal="given"`: complexity of each task."""
    base: Mapping[str, float] = field(factory=dict, validator=numbers())
    """Relative base frequency of each task. Default: equal."""
    temperature: float = field(default=1.0, validator=number(minimum=1e-3))
    """Below 1, the hardest tasks get more samples; above 1, all tasks are closer to `base`."""
    floor: float = field(default=0.05, validator=number(below=1.0))
    """Minimum probability of a task, as a fraction of 1 / (number of tasks)."""
    correction: float = field(default=0.0, validator=number(maximum=1.0))
    """Strength of importance weights: 1 keeps the expected gradient of `base`, 0 uses none."""
    smoothing: float = field(default=0.9, validator=number(below=1.0))
    """Decay of the moving average of each task's loss."""
    slow_smoothing: float = field(default=0.98, validator=number(below=1.0))
    """With `signal="progress"`: decay of the slower average that the loss is compared with."""
    warmup_steps: int = field(default=10, validator=integer(minimum=0))
    """Updates sampled by `base`, until losses are known."""

    def __attrs_post_init__(self) -> None:
        rules = (
            UsedIf("given", "with tasks.signal='given'", lambda tasks: tasks.signal == "given"),
            UsedIf(
                "slow_smoothing",
                "with tasks.signal='progress'",
                lambda tasks: tasks.signal == "progress",
            ),
            UsedIf(
                "smoothing",
                "with tasks.signal='loss' or 'progress'",
                lambda tasks: tasks.signal != "given",
            ),
        )
        check_used(self, rules, error=ConfigError, prefix="tasks.")


def task_options(value: Any) -> TaskOptions | None:
    """Convert a `tasks` setting: options, a table of them, or None.

    Raises:
        ConfigError: the value has another type.
    """
    return None if value is None else table_of(TaskOptions, "tasks")(value)


class TaskSampler:
    """Samples the task of each row.

    Args:
        names: task names; `task` in a batch is an index into them.
        options: sampling settings.
        seed: random seed.

    Raises:
        ConfigError: tasks named in the options are not those in `names`.
    """

    def __init__(self, names: Sequence[str], options: TaskOptions, *, seed: int = 0) -> None:
        self.names = tuple(names)
        self.options = options
        self.seed = seed
        self.step = 0
        """Updates observed so far."""
        self.fast: list[float | None] = [None] * len(self.names)
        """Smoothed loss of each task; None before its first sample."""
        self.slow: list[float | None] = [None] * len(self.names)
        self.base = _normalized(self.names, options.base or dict.fromkeys(names, 1.0), "base")
        if options.signal == "given":
            _normalized(self.names, options.given, "given")

    def complexities(self) -> list[float]:
        """Return the complexity of each task, at least MIN_COMPLEXITY; 1 during warmup."""
        if self.options.signal == "given":
            return [max(float(self.options.given[name]), MIN_COMPLEXITY) for name in self.names]
        losses = [loss for loss in self.fast if loss is not None]
        if self.step < self.options.warmup_steps or not losses:
            return [1.0] * len(self.names)
        if self.options.signal == "loss":
            mean = sum(losses) / len(losses)  # for tasks without samples so far
            return [max(mean if loss is None else loss, MIN_COMPLEXITY) for loss in self.fast]
        # Relative difference of slow and fast averages, a measure of how fast the loss falls.
        rates = [
            None if fast is None or slow is None else abs(slow - fast) / max(slow, MIN_COMPLEXITY)
            for fast, slow in zip(self.fast, self.slow, strict=True)
        ]
        # Tasks without samples so far get the highest rate, so that they are tried.
        measured = [rate for rate in rates if rate is not None]
        return [max(max(measured) if rate is None else rate, MIN_COMPLEXITY) for rate in rates]

    def probabilities(self) -> list[float]:
        """Return the sampling probability of each task; they sum to 1."""
        # A temperature below 1 sharpens the distribution towards complex tasks.
        powers = [value ** (1.0 / self.options.temperature) for value in self.complexities()]
        weights = [base * power for base, power in zip(self.base, powers, strict=True)]
        total, floor = sum(weights), self.options.floor / len(self.names)
        if not 0.0 < total < math.inf:  # powers of low temperatures may overflow or underflow
            weights, total = list(self.base), 1.0
        active = sum(1 for base in self.base if base > 0)
        # Each task with a base frequency gets the floor, and the rest is divided by weight.
        remaining = 1.0 - floor * active
        return [
            (floor + remaining * weight / total) if base > 0 else 0.0
            for base, weight in zip(self.base, weights, strict=True)
        ]

    def draw(self, rows: int) -> tuple[list[int], list[float]]:
        """Sample the task of each of the next rows; return tasks and importance weights.

        The same step and losses give the same tasks on every process.
        """
        probabilities = self.probabilities()
        # A string seed is hashed identically on every machine and Python version.
        start = random.Random(f"ms-align tasks {self.seed} {self.step}").random()
        tasks = systematic_sample(probabilities, rows, start)
        return tasks, [self.importance(task, probabilities) for task in tasks]

    def importance(self, task: int, probabilities: Sequence[float]) -> float:
        """Return the importance weight of a row of `task` under these probabilities."""
        return float((self.base[task] / probabilities[task]) ** self.options.correction)

    def observe(self, losses: Sequence[float | None]) -> None:
        """Update the smoothed losses from an update's mean task losses; None: no rows."""
        for smoothed, decay in (
            (self.fast, self.options.smoothing),
            (self.slow, self.options.slow_smoothing),
        ):
            for task, loss in enumerate(losses):
                if loss is not None and math.isfinite(loss):
                    average = smoothed[task]
                    smoothed[task] = (
                        loss if average is None else decay * average + (1 - decay) * loss
                    )
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's state as JSON values."""
        return {
            "names": list(self.names),
            "step": self.step,
            "fast": list(self.fast),
            "slow": list(self.slow),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state.

        Raises:
            CheckpointError: the state has other tasks.
        """
        if tuple(state["names"]) != self.names:
            raise CheckpointError(
                f"the sampler's state has the tasks {state['names']}, this run has "
                f"{list(self.names)}; set another output_dir"
            )
        self.step = int(state["step"])
        self.fast, self.slow = list(state["fast"]), list(state["slow"])


def systematic_sample(probabilities: Sequence[float], rows: int, start: float) -> list[int]:
    """Return the task at (start + i) / rows of the cumulative probabilities for each row i.

    `start` is from [0, 1).
    """
    tasks, task, cumulative = [], 0, probabilities[0]
    last = max(index for index, probability in enumerate(probabilities) if probability > 0)
    for row in range(rows):
        # `last` guards against rounding of the cumulative sum at the end.
        while (start + row) / rows >= cumulative and task < last:
            task += 1
            cumulative += probabilities[task]
        tasks.append(task)
    return tasks


def _normalized(names: Sequence[str], numbers: Mapping[str, float], setting: str) -> list[float]:
    if set(numbers) != set(names):
        raise ConfigError(
            f"{setting} must have a number for each task {sorted(names)}, got {sorted(numbers)}; "
            "rename them"
        )
    values = [numbers[name] for name in names]
    if not all(isinstance(value, int | float) and 0 <= value < math.inf for value in values):
        raise ConfigError(f"{setting} must be numbers of 0 or more, got {dict(numbers)}; fix them")
    total = sum(values)
    if total <= 0:
        raise ConfigError(
            f"{setting} must have a number above 0, got {dict(numbers)}; raise at least one"
        )
    return [value / total for value in values]
