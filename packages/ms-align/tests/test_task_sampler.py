"""Task sampling: probabilities, floors, and an unbiased expected gradient."""

import itertools
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ms_align.errors import CheckpointError, ConfigError
from ms_align.losses.learned_weights import Uncertainty
from ms_align.losses.sft import SFTLoss
from ms_align.streams.task_sampler import TaskOptions, TaskSampler, systematic_sample

CHANCES = st.lists(st.floats(0.01, 1), min_size=1, max_size=6).map(
    lambda values: [value / sum(values) for value in values]
)


class Table:
    """Output whose token losses are fixed."""

    def __init__(self, losses: torch.Tensor) -> None:
        self.losses = losses

    def token_losses(self, targets: torch.Tensor) -> torch.Tensor:
        """Return the losses at targets."""
        return self.losses * (targets != -100)


@pytest.mark.parametrize("signal", ["loss", "progress", "given"])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
def test_the_corrected_expected_gradient_equals_that_of_the_base(
    signal: str, temperature: float
) -> None:
    """Enumerates every start of a systematic sample of 5 rows from 3 tasks.

    The sample changes only where start crosses a multiple of the cumulative probabilities, so the
    integral over start is a finite sum. Tasks have different gradients and token weights.
    """
    base = {"a": 5.0, "b": 3.0, "c": 2.0}
    options = TaskOptions(
        signal=signal,  # type: ignore[arg-type]
        given={"a": 0.1, "b": 1.0, "c": 4.0} if signal == "given" else {},
        base=base,
        temperature=temperature,
        correction=1.0,
        warmup_steps=0,
    )
    sampler = TaskSampler(list(base), options)
    for losses in ([3.0, 1.0, 0.2], [1.0, 0.9, 0.2]):
        sampler.observe(losses)
    chances, rows = sampler.probabilities(), 5
    assert max(abs(q - p) for q, p in zip(chances, sampler.base, strict=True)) > 0.02
    edges = {0.0, 1.0}
    for cumulative in itertools.accumulate(chances):
        edges |= {cumulative * rows - row for row in range(rows) if 0 < cumulative * rows - row < 1}
    expected = torch.zeros(3, dtype=torch.float64)
    for low, high in itertools.pairwise(sorted(edges)):
        tasks = systematic_sample(chances, rows, (low + high) / 2)
        expected += (high - low) * gradient(tasks, sampler, chances)
    exact = torch.tensor(sampler.base, dtype=torch.float64) * torch.tensor([1.0, 2.0, 3.0])
    # Float32 weights: a few roundings of relative size 6e-8.
    torch.testing.assert_close(expected, exact, rtol=1e-5, atol=0)


def gradient(tasks: list[int], sampler: TaskSampler, chances: list[float]) -> torch.Tensor:
    """Return the gradient of `SFTLoss(per_row=True)` on rows of these tasks.

    The loss of task k is (k + 1)·w_k.
    """
    weight = torch.ones(3, requires_grad=True)
    task = torch.tensor(tasks)
    token_weights = torch.tensor([[1.0, 1.0, 0.0], [0.5, 2.0, 7.0], [1.0, 0.0, 0.0]])[task]
    losses = ((task + 1) * weight[task])[:, None].expand(-1, 3)
    batch = {
        "tokens": torch.zeros(len(tasks), 3, dtype=torch.int64),
        "targets": torch.where(token_weights > 0, 1, -100),
        "weights": token_weights,
        "task": task,
        "row_weights": torch.tensor([sampler.importance(index, chances) for index in tasks]),
    }
    loss = SFTLoss(tasks=3, per_row=True)
    total, _ = loss(Table(losses), batch)  # type: ignore[arg-type]
    (total / loss.weight(batch)).backward()
    assert weight.grad is not None
    return weight.grad.double()


@given(CHANCES, st.integers(1, 20), st.floats(0, 1, exclude_max=True))
def test_each_task_gets_its_share_to_within_one_row(
    chances: list[float], rows: int, start: float
) -> None:
    """Floor or ceil of rows · q; a task with probability 0 gets no rows."""
    tasks = systematic_sample(chances, rows, start)
    assert len(tasks) == rows
    for task, chance in enumerate(chances):
        # Cumulative sums round, so a row at an edge may go to a neighbor.
        assert abs(tasks.count(task) - rows * chance) <= 1 + 1e-9
    assert 0 not in systematic_sample([0.0, *chances], rows, start)


@settings(deadline=None)
@given(
    st.lists(st.floats(1e-3, 10), min_size=3, max_size=3),
    st.floats(0.1, 10),
    st.floats(0, 0.9),
)
def test_probabilities_follow_the_loss_above_a_floor(
    losses: list[float], temperature: float, floor: float
) -> None:
    """Harder tasks are more likely; high temperatures level the probabilities."""
    options = TaskOptions(temperature=temperature, floor=floor, warmup_steps=0)
    sampler = TaskSampler(["a", "b", "c"], options)
    assert sampler.probabilities() == pytest.approx([1 / 3] * 3)
    sampler.observe(losses)
    chances = sampler.probabilities()
    assert sum(chances) == pytest.approx(1)
    assert min(chances) >= floor / 3 - 1e-12
    order = sorted(range(3), key=losses.__getitem__)
    assert all(chances[a] <= chances[b] + 1e-12 for a, b in itertools.pairwise(order))


def test_progress_prefers_tasks_that_are_being_learned() -> None:
    """A falling loss ranks above a constant high loss and a converged one."""
    options = TaskOptions(signal="progress", warmup_steps=0, floor=0.1)
    sampler = TaskSampler(["stuck", "falling", "done"], options)
    for step in range(60):
        sampler.observe([4.0, 4.0 * math.exp(-step / 30), 0.01])
    stuck, falling, done = sampler.probabilities()
    assert falling > 0.8
    assert stuck == pytest.approx(done, abs=1e-3)


def test_the_state_survives_json() -> None:
    """A restored sampler gives the same probabilities and samples."""
    sampler = TaskSampler(["a", "b"], TaskOptions(warmup_steps=1), seed=3)
    for step in range(7):
        sampler.observe([1.0 + step, None if step < 3 else 0.2])
    restored = TaskSampler(["a", "b"], TaskOptions(warmup_steps=1), seed=3)
    restored.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    assert restored.draw(16) == sampler.draw(16)
    with pytest.raises(CheckpointError, match="has the tasks"):
        TaskSampler(["a", "c"], TaskOptions()).load_state_dict(sampler.state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base": {"a": 1.0}}, "base must have a number for each task"),
        (
            {"signal": "given", "given": {"a": 1.0, "x": 2.0}},
            "given must have a number for each task",
        ),
        ({"base": {"a": 0.0, "b": 0.0}}, "base must have a number above 0"),
        ({"base": {"a": -1.0, "b": 1.0}}, "base must be .* of at least 0"),
    ],
)
def test_options_of_other_tasks_are_rejected(options: dict[str, object], message: str) -> None:
    """One line names the option."""
    with pytest.raises(ConfigError, match=message):
        TaskSampler(["a", "b"], TaskOptions(**options))  # type: ignore[arg-type]


def test_learned_weights_follow_the_gradient_of_the_total_loss() -> None:
    """Each step equals autograd on Σ share·(exp(-s)·L + s/2); at equilibrium exp(s) = 2·L."""
    losses, shares = [3.0, 0.5, 1.0], [0.5, 0.3, 0.2]
    uncertainty = Uncertainty(log_variances=[0.3, -0.2, 0.0], rate=0.1)
    s = torch.tensor(uncertainty.log_variances, requires_grad=True)
    total = (torch.tensor(shares) * (torch.exp(-s) * torch.tensor(losses) + s / 2)).sum()
    total.backward()
    assert s.grad is not None
    before = list(uncertainty.log_variances)
    uncertainty.observe(losses, shares)
    steps = [(a - b) / 0.1 for a, b in zip(before, uncertainty.log_variances, strict=True)]
    assert steps == pytest.approx(s.grad.tolist(), rel=1e-5)
    for _ in range(3000):
        uncertainty.observe(losses, shares)
    assert uncertainty.weights() == pytest.approx([1 / (2 * loss) for loss in losses], rel=1e-3)
