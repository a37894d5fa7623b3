"""How do I give a model my own operator, and check that it is right?

    python examples/kernels/own_operator.py

A model takes its operators as a namespace with the protocol `ms_parallel.operators.Ops`. Here all
operators come from ms_kernels except SwiGLU, which is written by hand with a backward that saves
fewer tensors. Its values and gradients are compared with the float64 reference, which also exposes
a faulty version; then a model trains with it and gets the same losses as with the default.
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
    """silu(gate) · up, which saves only its inputs and recomputes the sigmoid."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        """Elementwise, for any shape."""
        ctx.save_for_backward(gate, up)
        return gate * torch.sigmoid(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of both inputs."""
        gate, up = ctx.saved_tensors
        activation = torch.sigmoid(gate)
        return grad * up * activation * (1 + gate * (1 - activation)), grad * gate * activation


def my_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The operator with the signature that `Ops` expects."""
    result: Tensor = Gate.apply(gate, up)  # type: ignore[no-untyped-call]
    return result


def faulty_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """A deliberate bug: correct values, but half of one gradient."""
    return my_swiglu(gate, up.detach() + (up - up.detach()) / 2)


def max_error(swiglu: Any) -> float:
    """Largest difference of values and gradients from the float64 reference."""
    torch.manual_seed(0)
    inputs = [torch.randn(7, 33, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    weights = torch.randn(7, 33, dtype=torch.float64)
    output = swiglu(*inputs)
    with use_backend("reference"):
        expected = ms_kernels.swiglu(*inputs)
    pairs = [(output, expected)]
    pairs += zip(
        torch.autograd.grad((output * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
        strict=True,
    )
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def losses(ops: Ops | None) -> list[float]:
    """Losses of six updates of a small model with these operators."""
    sizes = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2, "vocab_size": 256}
    engine = Engine(architecture("llama", sizes), ops=ops, device="cpu")
    tokens = torch.tensor(list((__doc__ or "").encode()[: 4 * 65])).view(4, 65)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    return [engine.step(batch, NextTokenLoss()).loss for _ in range(6)]


def main(arguments: list[str] | None = None) -> None:
    """Check the operator, then train with it."""
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    error, faulty_error = max_error(my_swiglu), max_error(faulty_swiglu)
    print(f"errors against the reference: custom {error:.1e}, faulty {faulty_error:.1e}")
    assert error < 1e-12 < faulty_error
    names = [name for name in ms_kernels.__all__ if hasattr(ms_kernels, name)]
    custom_ops = SimpleNamespace(**{name: getattr(ms_kernels, name) for name in names})
    custom_ops.swiglu = my_swiglu
    custom_losses, default_losses = losses(cast(Ops, custom_ops)), losses(None)
    print("custom ops: ", *(f"{loss:.5f}" for loss in custom_losses))
    print("default ops:", *(f"{loss:.5f}" for loss in default_losses))
    assert all(abs(a - b) < 1e-4 for a, b in zip(custom_losses, default_losses, strict=True))


if __name__ == "__main__":
    main()
