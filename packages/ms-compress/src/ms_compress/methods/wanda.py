"""Wanda: prune the weights that are small for the inputs they meet.

Sun et al. 2023, arXiv:2306.11695: the score of a weight is its magnitude times the norm of its
input feature over the calibration tokens, compared within each row.
"""

from collections.abc import Callable, Sequence

import attrs
import torch
from torch import Tensor, nn

from ms_compress.methods.calibration import walk
from ms_compress.methods.pattern import Pattern, Unstructured, pattern
from ms_compress.methods.pruning import check_pattern, keep_zeros
from ms_compress.models.selection import select
from ms_compress.quantisation.layers import prepare_layer


def wanda(
    model: nn.Module,
    how: str | float | Pattern,
    batches: Sequence[Tensor],
    *,
    exceptions: Sequence[str] = (),
    progress: Callable[[int, int], object] | None = None,
) -> None:
    """Mask every linear layer but the head by Wanda's scores, in place.

    Args:
        model: a whole decoder of ms-parallel or transformers, not split or sharded.
        how: `"2:4"`, a share such as 0.5 (of each row), or a pattern.
        batches: calibration tokens, (B, S) int64 each.
        exceptions: patterns of names of layers that are left dense.
        progress: called with the decoder layers that are done, from none on, and all there are.

    Raises:
        LayerError: the pattern does not divide a layer's rows; nothing is masked then.
        CalibrationError: there are no tokens or a weight is not finite, and nothing is masked; or a
            layer's input is not finite, and layers before it are masked already.
    """
    wanted = pattern(how)
    if isinstance(wanted, Unstructured):
        wanted = attrs.evolve(wanted, by_row=True)
    chosen = select(model, exceptions)
    check_pattern(model, wanted, chosen)

    def visit(name: str, layer: nn.Linear, squares: Tensor) -> None:
        scores = layer.weight.detach().abs().float() * squares.sqrt()
        prepare_layer(layer, name, None).set_mask(wanted.keep(scores))

    names = {name for name, _ in chosen}
    walk(model, batches, _add_squares, visit, names, progress=progress)
    keep_zeros(model)


def _add_squares(held: Tensor | None, inputs: Tensor) -> Tensor:
    """Add up the squares of each feature, (K,)."""
    squares = inputs.square().sum(0)
    return squares if held is None else torch.add(held, squares)
