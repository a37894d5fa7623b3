"""GPTQ on both sides of a weight: errors are weighted by their effect on the model's predictions.

Plain GPTQ minimizes errors of a layer's output and weights all output features equally. Near the
original weights, the model's divergence from itself is ½ tr(O E I Eᵀ) for a layer's weight error E,
with the Fisher information approximated as the Kronecker product of I, the second moment of inputs,
and O, the second moment of output gradients (Martens and Grosse 2015, arXiv:1503.05671). Each
error is compensated in both directions (YAQA, Tseng et al. 2025, arXiv:2505.22988). Difference
from that paper: O comes from one pass over sampled targets, without power iteration, which gained
only 0.4%.
Shapes: N rows (output features), K columns (input features), G groups per row, T tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ms_compress.errors import CalibrationError
from ms_compress.models.logits import next_token_logits
from ms_compress.quantization.rounding import (
    best_factor,
    compute_scales,
    compute_zeros,
    per_weight,
    round_with_scales,
)
from ms_compress.quantization.scheme import Scheme

TILE = 128
"""Rows and columns per tile, whose errors are collected before the remainder is updated."""


def output_squares(
    model: nn.Module, layers: Mapping[str, nn.Module], batches: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Return the sum over tokens of g gᵀ, (N, N) float32, with g the gradient of a layer's output.

    Targets are sampled from the model's own predictions with a fixed seed. The sum then estimates
    the output's Fisher information, and the batches need no targets.

    Args:
        model: a complete decoder from ms-parallel or transformers, in evaluation mode.
        layers: linear layers of the model, by name.
        batches: tokens, (B, S) int64 each.

    Raises:
        CalibrationError: a logit is not finite.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device=device).manual_seed(0)
    sums: dict[str, Tensor] = {}
    with torch.enable_grad(), _frozen(model), _outputs_of(layers) as outputs:
        for batch in batches:
            logits = next_token_logits(model, batch.to(device)).float().flatten(0, 1)
            if not bool(torch.isfinite(logits).all()):
                raise CalibrationError(
                    "the model's logits of the calibration tokens are NaN or infinite; check the"
                    f" weights after {next(iter(layers))}, and the tokens"
                )
            # Sampled, not argmax: only then is the sum an estimate of the Fisher information.
            sampled = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)
            loss = F.cross_entropy(logits, sampled.squeeze(1), reduction="sum")
            gradients = torch.autograd.grad(loss, list(outputs.values()))
            for name, gradient in zip(outputs, gradients, strict=True):
                flat = gradient.flatten(0, -2).float()  # (T, N)
                sums[name] = sums[name].addmm_(flat.t(), flat) if name in sums else flat.t() @ flat
            outputs.clear()
    return sums


@contextmanager
def _outputs_of(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """Record the layers' outputs in the last forward; the first ones become leaves of the graph."""
    outputs: dict[str, Tensor] = {}

    def record(name: str, layer: nn.Module) -> torch.utils.hooks.RemovableHandle:
        def hook(module: nn.Module, inputs: object, output: Tensor) -> None:
            outputs[name] = output if output.requires_grad else output.requires_grad_()

        return layer.register_forward_hook(hook)

    with ExitStack() as hooks:
        for name, layer in layers.items():
            hooks.enter_context(record(name, layer))
        yield outputs


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Disable gradients of parameters, so that no graph is stored for them."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_()


@torch.no_grad()
def round_by_loss(
    name: str,
    weight: Tensor,
    inputs: Tensor,
    outputs: Tensor,
    scheme: Scheme,
    *,
    mask: Tensor | None = None,
    damping: float = 0.01,
    fit_scales: bool = False,
) -> tuple[Tensor, Tensor]:
    """Round one weight; return it (N, K) and its scales (R, G).

    With I = AᵀDA and O = BᵀD'B, where A and B are unit lower triangular, the cost of an error E is
    the sum of squares of √D' (B E Aᵀ) √D. Each entry of B E Aᵀ contains its own error and the
    errors of entries above and to the left, which are compensated when it is rounded. Features
    with the largest inputs and outputs come first; scales come from the original weight.

    Args:
        name: name of the layer, for messages.
        weight: (N, K).
        inputs: (K, K), Xᵀ X of the layer's inputs.
        outputs: (N, N), from `output_squares`.
        scheme: quantization scheme.
        mask: (N, K) bool; pruned weights stay zero.
        damping: fraction of the mean of each diagonal to add to that diagonal.
        fit_scales: search for the scale of each group with the smallest error.

    Raises:
        CalibrationError: a factor is not positive definite.
    """
    masked = weight.float() if mask is None else weight.float() * mask
    is_fitted = fit_scales or scheme.super_block is not None
    factor = best_factor(masked, scheme, inputs.diagonal()) if is_fitted else None
    scales = compute_scales(masked, scheme, factor)
    zeros = compute_zeros(masked, scales, scheme, factor)
    rows = outputs.diagonal().argsort(descending=True)  # (N,), most important outputs first
    columns = inputs.diagonal().argsort(descending=True)  # (K,), most important inputs first
    permuted = (rows.unsqueeze(1), columns)  # indexes (N, K)
    rounded = _round(
        masked[permuted],
        per_weight(scales, masked.shape, scheme)[permuted],
        None if zeros is None else per_weight(zeros, masked.shape, scheme)[permuted],
        None if mask is None else mask[permuted],
        _unit_lower(name, outputs[rows][:, rows], damping),
        _unit_lower(name, inputs[columns][:, columns], damping),
        scheme,
    )
    unpermuted = torch.empty_like(rounded)
    unpermuted[permuted] = rounded
    return unpermuted.to(weight.dtype), scales


def _unit_lower(name: str, square: Tensor, damping: float) -> Tensor:
    """Factor the damped matrix as AᵀDA; return A, unit lower triangular."""
    damped = square.clone()
    diagonal = damped.diagonal()
    mean = diagonal[diagonal != 0].mean()
    diagonal[diagonal == 0] = mean  # a feature that is always zero: any value works
    diagonal += damping * mean
    # Reversing the order of rows and columns turns the factorization L Lᵀ into Uᵀ U.
    lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
    if int(failed):
        raise CalibrationError(
            f"{name}: the second moments of its inputs and outputs cannot be factored with damping"
            f" {damping}; use more calibration tokens or a larger damping"
        )
    unit: Tensor = (lower / lower.diagonal()).flip(0, 1).t().contiguous()
    return unit


def _round(
    weight: Tensor,
    steps: Tensor,
    zeros: Tensor | None,
    mask: Tensor | None,
    across_rows: Tensor,
    across_columns: Tensor,
    scheme: Scheme,
) -> Tensor:
    """Round weights (N, K) tile by tile; `steps` and `zeros` (N, K) are those of each weight."""
    rounded = torch.zeros_like(weight)
    height, width = weight.shape
    for tile_start in range(0, width, TILE):
        tile_columns = slice(tile_start, tile_start + TILE)
        column_factor = across_columns[tile_columns, tile_columns]
        # E Aᵀ for these columns, from the columns already rounded: (N, TILE).
        column_error = (rounded - weight)[:, :tile_start] @ across_columns[
            tile_columns, :tile_start
        ].t()
        for top in range(0, height, TILE):
            tile = (slice(top, top + TILE), tile_columns)
            bottom = min(top + TILE, height)
            # compensated for the rows above
            target = weight[tile] - across_rows[tile[0], :bottom] @ column_error[:bottom]
            keep = None if mask is None else mask[tile]
            zero = None if zeros is None else zeros[tile]
            row_factor = across_rows[tile[0], tile[0]]
            rounded[tile] = _round_tile(
                target, weight[tile], steps[tile], zero, keep, row_factor, column_factor, scheme
            )
            column_error[tile[0]] += (rounded[tile] - weight[tile]) @ column_factor.t()
    return rounded


def _round_tile(
    target: Tensor,
    weight: Tensor,
    steps: Tensor,
    zeros: Tensor | None,
    mask: Tensor | None,
    across_rows: Tensor,
    across_columns: Tensor,
    scheme: Scheme,
) -> Tensor:
    """Round one tile along its anti-diagonals, whose entries do not affect each other.

    `target` is the tile's weight compensated for the errors of other tiles.
    """
    rounded = torch.zeros_like(weight)
    height, width = weight.shape
    device = weight.device
    for diagonal in range(height + width - 1):
        first = max(0, diagonal - width + 1)
        rows = torch.arange(first, min(height, diagonal + 1), device=device)
        columns = diagonal - rows  # one entry per row: row + column = diagonal
        zero = None if zeros is None else zeros[rows, columns]
        values = round_with_scales(target[rows, columns], steps[rows, columns], scheme, zero)
        if mask is not None:
            values *= mask[rows, columns]
        rounded[rows, columns] = values
        errors = values - weight[rows, columns]
        last = max(0, diagonal - height + 1)
        # Only later rows and columns see these errors: rows from `first`, columns from `last`.
        target[first:, last:] -= (across_rows[first:, rows] * errors) @ across_columns[
            last:, columns
        ].t()
    return rounded
