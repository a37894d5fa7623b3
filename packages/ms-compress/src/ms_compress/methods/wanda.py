"""Wanda: prune the weights that are small relative to their inputs.

Sun et al. 2023, arXiv:2306.11695: the score of a weight is its magnitude times the norm of its
input feature over the calibration tokens, compared within each row.
"""

from collections.abc import Callable, Sequence

import attrs
import torch
from torch import Tensor, nn

from ms_compress.arguments import check_callable, check_items
from ms_compress.errors import CalibrationError
from ms_compress.methods.calibration import CalibratedBlock, walk
from ms_compress.methods.pattern import Pattern, Unstructured, parse_pattern
from ms_compress.methods.pruning import check_pattern, keep_zeros
from ms_compress.models.selection import select
from ms_compress.quantization.layers import prepare_layer


def wanda(
    model: nn.Module,
    pattern: str | float | Pattern,
    batches: Sequence[Tensor],
    *,
    ignore: Sequence[str] = (),
    progress: Callable[[int, int], object] | None = None,
) -> None:
    """Mask every linear layer except the head by Wanda's scores, in place.

    Args:
        model: a complete decoder from ms-parallel or transformers, not split or sharded.
        pattern: `"2:4"`, a sparsity such as 0.5 (of each row), or a pattern object.
        batches: calibration tokens, (B, S) int64 each.
        ignore: name patterns of layers to leave dense.
        progress: called with the number of finished decoder layers, from 0, and their total.

    Raises:
        LayerError: the pattern does not divide a layer's rows; nothing is masked then.
        CalibrationError: no tokens are given or a weight is not finite, and nothing is masked; or a
            layer's input is not finite, and earlier layers are already masked.
    """
    check_items("batches", batches, Tensor, "tensors of tokens", error=CalibrationError)
    check_callable("progress", progress, error=CalibrationError, optional=True)
    parsed = parse_pattern(pattern)
    if isinstance(parsed, Unstructured):
        # The paper compares within rows, since the scale of a row is not comparable to others.
        parsed = attrs.evolve(parsed, by_row=True)
    selected = select(model, ignore)
    check_pattern(model, parsed, selected)

    def visit(block: CalibratedBlock[Tensor]) -> None:
        for name, layer in block.layers.items():
            scores = layer.weight.detach().abs().float() * block.statistics[name].sqrt()
            prepare_layer(layer, name, None).set_mask(parsed.keep(scores))

    names = {name for name, _ in selected}
    walk(model, batches, _add_squares, visit, names, progress=progress)
    keep_zeros(model)


def _add_squares(total: Tensor | None, inputs: Tensor) -> Tensor:
    """Add the squared norm of each feature, (K,)."""
    squares = inputs.square().sum(0)  # (K,)
    return squares if total is None else torch.add(total, squares)
