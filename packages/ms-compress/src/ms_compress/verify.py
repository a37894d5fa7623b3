"""Is a folder, read by its own runtime, the model that was exported?

Logits of a probe are compared with those that the prepared model computes in training. What may
differ is the order of sums; where a target rounds activations, a value that lies on the border
between two codes may fall on either side of it, so there the middle of the differences is held.
A model of narrower weights is compared as float32 has it, which is what runtimes compute in.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from attrs import frozen
from torch import Tensor, nn

from ms_compress.errors import VerifyError
from ms_compress.layers import prepared_layers
from ms_compress.logits import model_logits
from ms_compress.runtimes import open_runtime
from ms_compress.wrappers import unwrapped

__all__ = ["Agreement", "compare", "verify"]

PROBE_ROWS = 2
PROBE_POSITIONS = 48
HALF = (torch.bfloat16, torch.float16)


@frozen(kw_only=True)
class Agreement:
    """How far a runtime's logits lie from the model's."""

    mean: float
    """Of absolute differences."""
    largest: float
    spread: float
    """Standard deviation of the model's own logits."""
    argmax: float
    """Share of positions at which both find the same token likeliest."""


def verify(
    model: nn.Module, folder: str | Path, target: str, *, tokens: Tensor | None = None
) -> Agreement:
    """Compare a folder, as its target's runtime computes it, with the model it came from.

    Args:
        model: prepared; its evaluation mode is used. Weights narrower than float32 are wide while
            it is asked.
        folder: exported.
        target: `"ct"`, `"ort"` or `"gguf"`.
        tokens: (B, S) int64 to compare on; by default numbers spread over the vocabulary.

    Raises:
        VerifyError: they are not the same model.
        ExportError: the runtime is missing or cannot read the folder.
    """
    folder, model = Path(folder), unwrapped(model)
    if tokens is None:
        tokens = probe(_vocabulary(model))
    with _in_float32(model):
        expected = model_logits(model, tokens)
    found = compare(expected, open_runtime(folder, target).logits(tokens))
    limit = 0.02 if target == "gguf" else 1e-4
    if any(layer.is_narrowed for _, layer in prepared_layers(model)):
        limit = 0.05  # mixed precision: the model cannot be asked in float32
    if not found.mean <= limit * found.spread:
        raise VerifyError(
            f"{folder}: its runtime's logits are off by {found.mean:.3g} on average, where the"
            f" model's own spread is {found.spread:.3g} and {limit * found.spread:.3g} is allowed;"
            " the file is not this model, export it again"
        )
    return found


def compare(expected: Tensor, got: Tensor) -> Agreement:
    """How far logits (B, S, V) lie from those expected."""
    if expected.shape != got.shape:
        raise VerifyError(
            f"the runtime gives logits of shape {tuple(got.shape)}, the model"
            f" {tuple(expected.shape)}"
        )
    apart = (expected - got).abs()
    return Agreement(
        mean=float(apart.mean()),
        largest=float(apart.max()),
        spread=float(expected.std()),
        argmax=float((expected.argmax(-1) == got.argmax(-1)).float().mean()),
    )


def probe(vocabulary: int) -> Tensor:
    """Tokens (2, 48) spread over a vocabulary, always the same."""
    count = PROBE_ROWS * PROBE_POSITIONS
    numbers = torch.arange(count, dtype=torch.int64) * 2654435761 % vocabulary
    return numbers.view(PROBE_ROWS, PROBE_POSITIONS)


@contextmanager
def _in_float32(model: nn.Module) -> Iterator[None]:
    """Widen a model in place, and narrow it again to the very values that it had."""
    tensors = [*model.parameters(), *model.buffers()]
    narrow = [(each, each.dtype) for each in tensors if each.dtype in HALF]
    for each, _ in narrow:
        each.data = each.data.float()
    try:
        yield
    finally:
        for each, dtype in narrow:
            each.data = each.data.to(dtype)


def _vocabulary(model: nn.Module) -> int:
    return int(model.config.vocab_size)  # type: ignore[union-attr,arg-type]
