"""Importance of input features: their mean square on calibration data, as llama.cpp's imatrix."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ms_compress.arguments import check_items
from ms_compress.errors import CalibrationError
from ms_compress.methods.calibration import CalibratedBlock, walk
from ms_compress.methods.data_ranks import ONE_PROCESS, DataRanks, check_ranks
from ms_compress.models.selection import select


def input_importance(
    model: nn.Module,
    batches: Sequence[Tensor],
    *,
    ignore: Sequence[str] = (),
    progress: Callable[[int, int], object] | None = None,
    ranks: DataRanks = ONE_PROCESS,
) -> dict[str, Tensor]:
    """Return the mean square of each input feature of the linear layers, (K,) float32 by name.

    For independent inputs with mean zero, the expected squared error of a layer's output is the sum
    of its weights' squared errors times these values.

    Args:
        model: a complete float decoder from ms-parallel or transformers.
        batches: calibration tokens, (B, S) int64 each.
        ignore: name patterns of layers to leave out.
        progress: called with the number of finished decoder layers, from 0, and their total.
        ranks: processes that calibrate on the other batches.

    Raises:
        LayerError: the model's architecture is not supported.
        CalibrationError: no tokens are given, or a weight or a layer's input is not finite.
        DataError: a token is outside the model's vocabulary.
    """
    check_ranks(ranks)
    check_items("batches", batches, Tensor, "tensors of tokens", error=CalibrationError)
    importance: dict[str, Tensor] = {}

    def visit(block: CalibratedBlock[Tensor]) -> None:
        for name, statistic in block.statistics.items():
            squares, count = statistic[:-1], statistic[-1]
            importance[name] = squares / count

    targets = {name for name, layer in select(model, ignore) if isinstance(layer, nn.Linear)}
    walk(
        model,
        batches,
        _add_squares,
        visit,
        targets,
        progress=progress,
        ranks=ranks,
        combine=DataRanks.sum,
    )
    return importance


def _add_squares(total: Tensor | None, inputs: Tensor) -> Tensor:
    """Add up the squares of inputs (T, K), and count the inputs, (K + 1,)."""
    count = torch.full((1,), float(len(inputs)), device=inputs.device)
    squares = torch.cat([inputs.square().sum(0), count])
    return squares if total is None else total.add_(squares)
