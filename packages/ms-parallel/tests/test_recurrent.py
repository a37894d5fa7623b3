"""The gated delta rule and the causal convolution against loops over positions."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ms_parallel.operators import causal_conv1d, gated_delta_rule

# Both sum about a hundred terms of order one in float64, in different orders.
TOLERANCE = {"rtol": 1e-9, "atol": 1e-11}


def documents_of(data: st.DataObject, rows: int, length: int) -> Tensor:
    """Random document ids, which may recur in a row."""
    numbers = st.lists(st.integers(0, 2), min_size=length, max_size=length)
    ids = [[number // 2 for number in data.draw(numbers)] for _ in range(rows)]
    return torch.tensor(ids, dtype=torch.int32).view(rows, length)


def slow_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, documents: Tensor
) -> Tensor:
    """The gated delta rule, one position at a time."""
    groups = v.shape[2] // k.shape[2]
    out = torch.zeros_like(v)
    for row in range(v.shape[0]):
        for head in range(v.shape[2]):
            state = v.new_zeros(k.shape[3], v.shape[3])
            for at in range(v.shape[1]):
                if at and documents[row, at] != documents[row, at - 1]:
                    state = torch.zeros_like(state)
                key, query = k[row, at, head // groups], q[row, at, head // groups]
                state = state * g[row, at, head].exp()
                error = v[row, at, head] - state.T @ key
                state = state + beta[row, at, head] * torch.outer(key, error)
                out[row, at, head] = state.T @ query * k.shape[3] ** -0.5
    return out


def slow_convolution(x: Tensor, weight: Tensor, bias: Tensor, documents: Tensor) -> Tensor:
    """The convolution, one tap at a time."""
    out = bias.expand_as(x).clone()
    for row in range(x.shape[0]):
        for at in range(x.shape[1]):
            for back in range(weight.shape[1]):
                inside = at - back >= 0
                if not inside or (documents[row, at - back : at + 1] != documents[row, at]).any():
                    break
                out[row, at] += weight[:, -1 - back] * x[row, at - back]
    return out


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_the_delta_rule_restarts_at_each_document(data: st.DataObject) -> None:
    """Outputs and all gradients, over several chunks, grouped heads and one-token documents."""
    rows, length = data.draw(st.integers(1, 2)), data.draw(st.sampled_from([1, 5, 64, 70]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))

    def rand(*shape: int) -> Tensor:
        return torch.randn(rows, length, *shape, generator=generator, dtype=torch.float64)

    k = torch.nn.functional.normalize(rand(1, 3), dim=-1)
    tensors = [rand(1, 3), k, rand(2, 2), -rand(2).exp(), rand(2).sigmoid()]
    leaves = [tensor.requires_grad_() for tensor in tensors]
    documents, upstream = documents_of(data, rows, length), rand(2, 2)
    fast = gated_delta_rule(*leaves, documents=documents)
    grads = torch.autograd.grad((fast * upstream).sum(), leaves)
    slow = slow_rule(*leaves, documents)
    expected = torch.autograd.grad((slow * upstream).sum(), leaves, allow_unused=True)
    torch.testing.assert_close(fast, slow, **TOLERANCE)
    for grad, exact in zip(grads, expected, strict=True):
        torch.testing.assert_close(
            grad, torch.zeros_like(grad) if exact is None else exact, **TOLERANCE
        )


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_the_convolution_reads_no_other_document(data: st.DataObject) -> None:
    """Outputs and gradients; without documents a row is a single one."""
    rows, length, taps = (data.draw(st.integers(1, limit)) for limit in (2, 9, 5))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    shapes = [(rows, length, 3), (3, taps), (3,)]
    leaves = [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]
    documents = documents_of(data, rows, length)
    for argument, ids in ((documents, documents), (None, torch.zeros_like(documents))):
        fast, slow = causal_conv1d(*leaves, documents=argument), slow_convolution(*leaves, ids)
        torch.testing.assert_close(fast, slow, **TOLERANCE)
        grads = [torch.autograd.grad(output.square().sum(), leaves) for output in (fast, slow)]
        for fast_grad, slow_grad in zip(*grads, strict=True):
            torch.testing.assert_close(fast_grad, slow_grad, **TOLERANCE)


def test_a_strong_decay_stays_finite() -> None:
    """A gate that closes completely clears the state in float32, with a finite gradient."""
    shape = (1, 130, 1)
    g = torch.full(shape, -200.0, requires_grad=True)
    q, k, v = (torch.ones(*shape, 2) for _ in range(3))
    out = gated_delta_rule(q, k / 2**0.5, v, g, torch.ones(shape))
    (gradient,) = torch.autograd.grad(out.sum(), [g])
    assert out.isfinite().all()
    assert gradient.isfinite().all()
    torch.testing.assert_close(out, torch.full_like(out, 1.0))
