"""How do I give a model my own operator, and check that it is right?

    python examples/kernels/own_operator.py

A model takes its operators as a namespace; the contract is `ms_parallel.operators.Ops`. Here all
come from ms_kernels but the gate of the feed-forward, which is written by hand with a gradient of
its own that keeps less. It is held against the reference in float64, in values and gradients, and
a faulty one is found; then a model trains on it as on the plain one.
"""

import argparse
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

import ms_kernels
from ms_kernels import use_backend
from ms_parallel import Engine, NextTokenLoss
from ms_parallel.models import architecture
from ms_parallel.operators import Ops


class Gate(torch.autograd.Function):
    """silu(gate) · up, which keeps its inputs alone and makes the sigmoid again."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        """Arguments of any shape."""
        ctx.save_for_backward(gate, up)
        return gate * torch.sigmoid(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of both inputs."""
        gate, up = ctx.saved_tensors
        share = torch.sigmoid(gate)
        return grad * up * share * (1 + gate * (1 - share)), grad * gate * share


def my_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The operator, with the face that the contract gives it."""
    result: Tensor = Gate.apply(gate, up)  # type: ignore[no-untyped-call]
    return result


def faulty_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """A slip of the hand: right values, and half of a gradient."""
    return my_swiglu(gate, up.detach() + (up - up.detach()) / 2)


def greatest_error(swiglu: Any) -> float:
    """The greatest difference from the reference in float64, of values and gradients."""
    torch.manual_seed(0)
    inputs = [torch.randn(7, 33, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    weight = torch.randn(7, 33, dtype=torch.float64)
    ours = swiglu(*inputs)
    with use_backend("reference"):
        truth = ms_kernels.swiglu(*inputs)
    pairs = [(ours, truth)]
    pairs += zip(
        torch.autograd.grad((ours * weight).sum(), inputs),
        torch.autograd.grad((truth * weight).sum(), inputs),
        strict=True,
    )
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def losses(ops: Ops | None) -> list[float]:
    """Six updates of a small model with these operators."""
    sizes = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2, "vocab_size": 256}
    engine = Engine(architecture("llama", sizes), ops=ops, device="cpu")
    tokens = torch.tensor(list((__doc__ or "").encode()[: 4 * 65])).view(4, 65)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    return [engine.step(batch, NextTokenLoss()).loss for _ in range(6)]


def main(arguments: list[str] | None = None) -> None:
    """Check, and train."""
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    right, wrong = greatest_error(my_swiglu), greatest_error(faulty_swiglu)
    print(f"errors against the reference: mine {right:.1e}, the faulty one {wrong:.1e}")
    assert right < 1e-12 < wrong
    names = [name for name in ms_kernels.__all__ if hasattr(ms_kernels, name)]
    mine = SimpleNamespace(**{name: getattr(ms_kernels, name) for name in names})
    mine.swiglu = my_swiglu
    with_mine, plain = losses(cast(Ops, mine)), losses(None)
    print("with mine:", *(f"{loss:.5f}" for loss in with_mine))
    print("plain    :", *(f"{loss:.5f}" for loss in plain))
    assert all(abs(a - b) < 1e-4 for a, b in zip(with_mine, plain, strict=True))


if __name__ == "__main__":
    main()
