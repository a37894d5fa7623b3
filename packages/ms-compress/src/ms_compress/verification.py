"""Is a folder, read by its own runtime, the model that was exported?

Each tensor must be the model's, bit for bit, as the format's own library reads it. That the runtime
does with them what training did is asked by the logits of a probe, in which the order of sums may
differ. Where inputs are rounded, one that lies on the border between two codes may fall on either
side of it and move all that follows, so there more is allowed. A model of narrower weights is
compared as float32 has it, which is what runtimes compute in.
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
from ms_compress.parts import Source
from ms_compress.rounding import Quantised
from ms_compress.runtimes import open_runtime
from ms_compress.stored import Reader, reader
from ms_compress.wrappers import unwrapped

__all__ = ["Agreement", "check_weights", "compare", "verify"]

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
    """Compare a folder, its tensors and what its target's runtime computes, with its model.

    Args:
        model: prepared; its evaluation mode is used. Weights narrower than float32 are wide while
            it is asked. If several processes hold it, all of them must call.
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
    # What a runtime leaves out, such as a buffer of the model's own, its logits may do without.
    runtime = open_runtime(folder, target, strict=False)
    check_weights(model, folder, target)
    with _in_float32(model):
        expected = model_logits(model, tokens)
    found = compare(expected, runtime.logits(tokens))
    limit = _limit(model, target)
    if not found.mean <= limit * found.spread:
        raise VerifyError(
            f"{folder}: its runtime's logits are off by {found.mean:.3g} on average, where the"
            f" model's own spread is {found.spread:.3g} and {limit * found.spread:.3g} is allowed;"
            " the file is not this model, export it again"
        )
    return found


def check_weights(model: nn.Module, folder: str | Path, target: str) -> None:
    """Compare each tensor of a folder, as its format's own library reads it, with the model's.

    Raises:
        VerifyError: names the first tensor that differs by a bit.
        ExportError: the format's library is missing.
    """
    source = Source(model)
    with source.together:
        read = reader(Path(folder), target, source.config)
        for name in source.entries:
            value = source.read(name)
            if value is not None:  # the first process has it, and compares
                _check_weight(folder, name, value, read)


def _check_weight(folder: str | Path, name: str, value: Quantised | Tensor, read: Reader) -> None:
    expected = value.weight() if isinstance(value, Quantised) else value.float()
    try:
        found = read(name)
    except KeyError as error:
        raise VerifyError(f"{folder}: {name} is not in it; export it again") from error
    if found.shape != expected.shape or not torch.equal(found, expected):
        raise VerifyError(
            f"{folder}: {name} is not this model's: {_difference(expected, found)}; export it again"
        )


def _difference(expected: Tensor, found: Tensor) -> str:
    if found.shape != expected.shape:
        return f"it is of shape {tuple(found.shape)}, not {tuple(expected.shape)}"
    apart = (found - expected).abs()
    count = int((apart != 0).sum())
    return f"{count} of its {apart.numel()} values differ, by up to {float(apart.max()):.3g}"


def _limit(model: nn.Module, target: str) -> float:
    """How far logits may be off on average, in units of their spread."""
    layers = [layer for _, layer in prepared_layers(model)]
    if any(layer.is_narrowed for layer in layers):
        return 0.05  # mixed precision: the model cannot be asked in float32
    rounded = target == "gguf" or any(layer.activations is not None for layer in layers)
    return 0.02 if rounded else 1e-4


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
