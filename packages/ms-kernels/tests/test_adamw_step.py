"""adamw_step: the steps of torch.optim.AdamW, in place."""

import itertools

import pytest
import torch

from ms_kernels import ArgumentError, adamw_step, use_backend
from ms_kernels.core import dispatch
from ms_kernels.operators import OPERATORS


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_twenty_steps_are_those_of_torch(dtype):
    """Weights and moments after 20 steps with changing rates and gradients.

    In bfloat16 torch is given float32 weights, rounded after each step as ours are; its own
    bfloat16 moments would lose small gradients.
    """
    torch.manual_seed(0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weights = torch.randn(7, 33).to(dtype)
    mean, square = torch.zeros(7, 33, dtype=wide), torch.zeros(7, 33, dtype=wide)
    theirs = weights.to(wide, copy=True).requires_grad_()
    optimizer = torch.optim.AdamW([theirs], betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    for step in range(1, 21):
        gradient = torch.randn(7, 33).to(dtype)
        rate = 0.01 / step
        adamw_step(
            weights,
            gradient,
            mean,
            square,
            step=step,
            learning_rate=rate,
            betas=(0.8, 0.95),
            eps=1e-6,
            weight_decay=0.1,
        )
        theirs.grad = gradient.to(wide)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        with torch.no_grad():
            theirs.copy_(theirs.to(dtype))
    state = optimizer.state[theirs]
    # The same operations in the same order, but for a rounding a step; bfloat16 may then round
    # a weight the other way: one unit in its last place.
    loose = {"rtol": 2**-7, "atol": 0} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(weights, theirs.detach().to(dtype), **loose)
    torch.testing.assert_close(mean, state["exp_avg"])
    torch.testing.assert_close(square, state["exp_avg_sq"])


def test_a_parameter_that_asks_for_gradients_is_written_all_the_same():
    """No graph is kept, and the parameter stays a leaf."""
    weights = torch.nn.Parameter(torch.ones(5))
    adamw_step(weights, torch.ones(5), torch.zeros(5), torch.zeros(5), step=1, learning_rate=0.5)
    # The first step moves by the rate, but for eps; decay takes 1 % of half.
    torch.testing.assert_close(weights.detach(), torch.full((5,), 1 - 0.5 - 0.005))
    assert weights.is_leaf
    assert weights.requires_grad


def test_changing_steps_and_rates_are_one_decision_and_still_checked(monkeypatch):
    """Ten thousand steps would otherwise be ten thousand decisions."""
    monkeypatch.setattr(dispatch, "_cache", {})
    tensors = [torch.zeros(4) for _ in range(4)]
    for step in range(1, 20):
        adamw_step(*tensors, step=step, learning_rate=1 / step)
    assert len(dispatch._cache) == 1
    with pytest.raises(ArgumentError, match="step is 0"):
        adamw_step(*tensors, step=0, learning_rate=0.1)
    with pytest.raises(ArgumentError, match="learning_rate is -1"):
        adamw_step(*tensors, step=1, learning_rate=-1)


def named(**changed):
    """Return the four tensors of a step, some replaced."""
    torch.manual_seed(0)
    made = {name: torch.randn(6, 4) for name in ("weights", "gradient", "mean", "square")}
    made["square"].abs_()
    return {**made, **changed}


BACKENDS = [
    each.backend
    for each in OPERATORS["adamw_step"].implementations
    if each.devices is None or "cpu" in each.devices
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pair", [*itertools.combinations(named(), 2)], ids="-".join)
def test_two_arguments_in_one_memory_are_refused_and_nothing_is_written(pair, backend):
    """The same tensor twice, or two views of one buffer that share a number."""
    room = torch.rand(60)
    for views in (
        (room[:24].view(6, 4), room[:24].view(6, 4)),
        (room[:24].view(6, 4), room[23:47].view(6, 4)),
        (room[:48:2].view(6, 4), room[22:46].view(6, 4)),
    ):
        given = named(**dict(zip(pair, views, strict=True)))
        before = {name: each.clone() for name, each in given.items()}
        # What the fused kernel cannot walk goes to the reference.
        with use_backend(backend, "reference"), pytest.raises(ArgumentError) as caught:
            adamw_step(**given, step=1, learning_rate=0.1)
        assert caught.value.argument == pair[1]
        assert f"in the memory of {pair[0]}" in str(caught.value)
        assert all(torch.equal(each, before[name]) for name, each in given.items())


def test_one_tensor_as_both_moments_is_refused_in_a_compiled_step_too():
    """A graph has no addresses, but it knows a tensor that is given twice."""
    moments = torch.zeros(6, 4)
    step = torch.compile(adamw_step, backend="eager")
    with pytest.raises(ArgumentError, match="square is in the memory of mean"):
        step(**named(mean=moments, square=moments), step=1, learning_rate=0.1)


def test_columns_of_one_buffer_are_no_overlap():
    """Moments kept side by side lie in each other's range, and share no number."""
    room = torch.zeros(6, 8)
    apart = named(mean=torch.zeros(6, 4), square=torch.zeros(6, 4))
    beside = named(mean=room[:, ::2], square=room[:, 1::2])
    for each in (apart, beside):
        adamw_step(**each, step=1, learning_rate=0.1)
    for name, each in apart.items():
        torch.testing.assert_close(beside[name], each)


def test_a_tensor_that_lies_on_itself_is_refused():
    """An expanded tensor would be written several times in one place."""
    with pytest.raises(ArgumentError, match="mean is of strides \\(0, 1\\), with elements"):
        adamw_step(**named(mean=torch.zeros(4).expand(6, 4)), step=1, learning_rate=0.1)
