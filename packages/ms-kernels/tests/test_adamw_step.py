"""adamw_step: matches torch.optim.AdamW, in place."""

import itertools

import pytest
import torch

from ms_kernels import ArgumentError, adamw_step, use_backend
from ms_kernels.core import dispatch
from ms_kernels.operators import OPERATORS


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_twenty_steps_match_torch(dtype):
    """Weights and moments after 20 steps with changing learning rates and gradients.

    For bfloat16, torch gets float32 weights that are rounded after each step like ours, because
    its bfloat16 moments would lose small gradients.
    """
    torch.manual_seed(0)
    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    weights = torch.randn(7, 33).to(dtype)
    mean, square = torch.zeros(7, 33, dtype=state_dtype), torch.zeros(7, 33, dtype=state_dtype)
    torch_weights = weights.to(state_dtype, copy=True).requires_grad_()
    optimizer = torch.optim.AdamW([torch_weights], betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
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
        torch_weights.grad = gradient.to(state_dtype)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        with torch.no_grad():
            torch_weights.copy_(torch_weights.to(dtype))
    state = optimizer.state[torch_weights]
    # The same operations in the same order up to one rounding per step; bfloat16 may then round
    # a weight the other way: one unit in its last place.
    tolerance = {"rtol": 2**-7, "atol": 0} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(weights, torch_weights.detach().to(dtype), **tolerance)
    torch.testing.assert_close(mean, state["exp_avg"])
    torch.testing.assert_close(square, state["exp_avg_sq"])


def test_a_parameter_that_requires_grad_is_updated_in_place():
    """No graph is recorded, and the parameter stays a leaf."""
    weights = torch.nn.Parameter(torch.ones(5))
    adamw_step(weights, torch.ones(5), torch.zeros(5), torch.zeros(5), step=1, learning_rate=0.5)
    # The first step moves by the learning rate, up to eps; decay takes 1% of 0.5.
    torch.testing.assert_close(weights.detach(), torch.full((5,), 1 - 0.5 - 0.005))
    assert weights.is_leaf
    assert weights.requires_grad


def test_changing_steps_and_rates_share_one_cached_decision(monkeypatch):
    """Otherwise ten thousand steps would be ten thousand decisions; values are still checked."""
    monkeypatch.setattr(dispatch, "_cache", {})
    tensors = [torch.zeros(4) for _ in range(4)]
    for step in range(1, 20):
        adamw_step(*tensors, step=step, learning_rate=1 / step)
    assert len(dispatch._cache) == 1
    with pytest.raises(ArgumentError, match="step is 0"):
        adamw_step(*tensors, step=0, learning_rate=0.1)
    with pytest.raises(ArgumentError, match="learning_rate is -1"):
        adamw_step(*tensors, step=1, learning_rate=-1)


def step_tensors(**overrides):
    """Return the four tensors of a step, with overrides."""
    torch.manual_seed(0)
    tensors = {name: torch.randn(6, 4) for name in ("weights", "gradient", "mean", "square")}
    tensors["square"].abs_()
    return {**tensors, **overrides}


BACKENDS = [
    impl.backend
    for impl in OPERATORS["adamw_step"].implementations
    if impl.devices is None or "cpu" in impl.devices
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pair", [*itertools.combinations(step_tensors(), 2)], ids="-".join)
def test_overlapping_arguments_are_refused_before_any_write(pair, backend):
    """The same tensor twice, or two overlapping views of one buffer."""
    buffer = torch.rand(60)
    for views in (
        (buffer[:24].view(6, 4), buffer[:24].view(6, 4)),
        (buffer[:24].view(6, 4), buffer[23:47].view(6, 4)),
        (buffer[:48:2].view(6, 4), buffer[22:46].view(6, 4)),
    ):
        tensors = step_tensors(**dict(zip(pair, views, strict=True)))
        originals = {name: tensor.clone() for name, tensor in tensors.items()}
        # Layouts that the fused kernel does not support go to the reference.
        with use_backend(backend, "reference"), pytest.raises(ArgumentError) as caught:
            adamw_step(**tensors, step=1, learning_rate=0.1)
        assert caught.value.argument == pair[1]
        assert f"in the memory of {pair[0]}" in str(caught.value)
        assert all(torch.equal(tensor, originals[name]) for name, tensor in tensors.items())


def test_a_compiled_step_refuses_one_tensor_for_both_moments():
    """A graph has no addresses, but it knows when an input is passed twice."""
    moments = torch.zeros(6, 4)
    step = torch.compile(adamw_step, backend="eager")
    with pytest.raises(ArgumentError, match="square is in the memory of mean"):
        step(**step_tensors(mean=moments, square=moments), step=1, learning_rate=0.1)


def test_interleaved_columns_do_not_overlap():
    """Moments in alternating columns span the same address range but share no element."""
    buffer = torch.zeros(6, 8)
    separate = step_tensors(mean=torch.zeros(6, 4), square=torch.zeros(6, 4))
    interleaved = step_tensors(mean=buffer[:, ::2], square=buffer[:, 1::2])
    for tensors in (separate, interleaved):
        adamw_step(**tensors, step=1, learning_rate=0.1)
    for name, tensor in separate.items():
        torch.testing.assert_close(interleaved[name], tensor)


def test_a_self_overlapping_tensor_is_refused():
    """An expanded tensor would be written several times at the same address."""
    with pytest.raises(ArgumentError, match="mean is of strides \\(0, 1\\), with elements"):
        adamw_step(**step_tensors(mean=torch.zeros(4).expand(6, 4)), step=1, learning_rate=0.1)
