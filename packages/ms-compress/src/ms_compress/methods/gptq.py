"""GPTQ: round weights column by column, compensating each error in the remaining columns.

Frantar et al. 2022, arXiv:2210.17323, algorithm 1. Differences from the paper:
1. A group's scales follow the target's rule, or are searched for with errors weighted by the
   Hessian's diagonal, when the group is reached.
2. With act_order, a group's columns are processed far apart, so its scales come from the original
   weight.
Shapes: N rows, K features.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor, nn

from ms_compress.arguments import check_flags
from ms_compress.errors import CalibrationError, ConfigError
from ms_compress.methods.calibration import (
    BlockCheckpoint,
    CalibratedBlock,
    calibrate_inputs,
    check_calibration,
    walk,
)
from ms_compress.methods.data_ranks import ONE_PROCESS, DataRanks, check_ranks
from ms_compress.methods.gptq_by_loss import output_squares, round_by_loss
from ms_compress.methods.qat import qat
from ms_compress.models.selection import select
from ms_compress.quantization.layers import FACTOR, Prepared, prepared_layers
from ms_compress.quantization.rounding import (
    best_factor,
    clamp_to_codes,
    compute_scales,
    compute_zeros,
    per_weight,
    round_with_scales,
)
from ms_compress.quantization.scheme import Scheme
from ms_compress.quantization.super_blocks import factor_of
from ms_compress.settings import number

BLOCK = 128
"""Number of columns whose errors are collected before the remaining columns are updated."""


def gptq(
    model: nn.Module,
    scheme_name: str | Scheme,
    batches: Sequence[Tensor],
    *,
    ignore: Sequence[str] = (),
    activations: bool = True,
    damping: float = 0.01,
    act_order: bool = False,
    by_loss: bool = False,
    fit_scales: bool = False,
    for_training: bool = False,
    checkpoint: BlockCheckpoint | None = None,
    progress: Callable[[int, int], object] | None = None,
    ranks: DataRanks = ONE_PROCESS,
) -> None:
    """Prepare a model for a scheme and round its weights with GPTQ, in place.

    Args:
        model: a complete decoder from ms-parallel or transformers; masks are preserved.
        scheme_name: scheme or its name, such as `"ct.int4_g32"`.
        batches: calibration tokens, (B, S) int64 each.
        ignore: name patterns of layers to leave unchanged.
        activations: also quantize inputs, if the target does.
        damping: fraction of the mean of the Hessian's diagonal to add to the diagonal.
        act_order: round the columns with the largest inputs first; columns keep their position and
            their group's scale, so the file format does not change.
        by_loss: weight errors by their effect on the model's predictions instead of the layer's
            output, in act order (see `gptq_by_loss`); takes a forward and a backward of the whole
            model per decoder layer.
        fit_scales: search for the scale of each group with the smallest error.
        for_training: leave each weight as close to its original value as its code allows, instead
            of at the code itself, from which a small learning rate would hardly move it.
        checkpoint: storage of finished decoder layers, to resume from.
        progress: called with the number of finished decoder layers, from 0, and their total.
        ranks: processes that calibrate on the other batches.

    Raises:
        ConfigError: damping is not above 0, or an exception matches nothing.
        LayerError: the model's architecture, or a layer, is not supported.
        CalibrationError: no tokens are given or a weight is not finite, and the model is unchanged;
            or a layer's input is not finite, and earlier layers are already rounded.
    """
    check_flags(
        activations=activations,
        act_order=act_order,
        by_loss=by_loss,
        fit_scales=fit_scales,
        for_training=for_training,
        error=ConfigError,
    )
    check_ranks(ranks, by_loss=by_loss)
    rounding = GPTQRounding(
        model=model,
        batches=batches,
        damping=damping,
        act_order=act_order,
        by_loss=by_loss,
        fit_scales=fit_scales,
        for_training=for_training,
    )
    check_calibration(model, batches, {name for name, _ in select(model, ignore)})
    qat(model, scheme_name, ignore=ignore, activations=activations, learned_scales=True)
    calibrate_inputs(model, batches, ranks=ranks)
    targets = {name for name, layer in prepared_layers(model) if layer.scheme is not None}

    def visit(block: CalibratedBlock[Tensor]) -> None:
        rounding.round_layers(block.layers, block.statistics)

    walk(
        model,
        batches,
        _add_outer,
        visit,
        targets,
        checkpoint=checkpoint,
        progress=progress,
        ranks=ranks,
        combine=DataRanks.sum,
    )


@frozen(kw_only=True, eq=False)
class GPTQRounding:
    """Rounds linear layers, one decoder layer at a time; for the fields see `gptq`."""

    model: nn.Module
    batches: Sequence[Tensor]
    damping: float = field(default=0.01, validator=number(minimum=1e-12))
    act_order: bool = False
    by_loss: bool = False
    fit_scales: bool = False
    for_training: bool = False

    def round_layers(
        self, layers: Mapping[str, nn.Linear], hessians: MutableMapping[str, Tensor]
    ) -> None:
        """Round prepared layers in place; removes each used XᵀX (K, K) of the inputs."""
        outputs = output_squares(self.model, layers, self.batches) if self.by_loss else {}
        for name, layer in layers.items():
            assert isinstance(layer, Prepared)
            assert layer.scheme is not None
            hessian = hessians.pop(name)
            # The factor of a K-quant also needs the minimums, which only the search knows.
            minimums = None
            if layer.scheme.super_block is not None:
                unpruned = layer.weight if layer.mask is None else layer.weight * layer.mask
                _, minimums = _scales(unpruned.detach(), layer.scheme, hessian.diagonal())
            weight, scales = self._round(name, layer, layer.scheme, hessian, outputs.get(name))
            if self.for_training:
                # Keep the float weights as far as they round to GPTQ's codes, as a start for QAT.
                original = layer.weight.detach()
                masked = original if layer.mask is None else original * layer.mask
                weight = clamp_to_codes(
                    masked, weight, per_weight(scales, weight.shape, layer.scheme), layer.scheme
                )
            layer.weight.copy_(weight)
            factor = factor_of_rounded(layer.weight.detach(), scales, layer.scheme, minimums)
            layer.get_parameter(FACTOR).copy_(factor)

    def _round(
        self, name: str, layer: Prepared, scheme: Scheme, hessian: Tensor, outputs: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        weight = layer.weight.detach()
        options: dict[str, Any] = {
            "mask": layer.mask,
            "damping": self.damping,
            "fit_scales": self.fit_scales,
        }
        if outputs is None:
            return gptq_weight(name, weight, hessian, scheme, act_order=self.act_order, **options)
        return round_by_loss(name, weight, hessian, outputs, scheme, **options)


def _add_outer(total: Tensor | None, inputs: Tensor) -> Tensor:
    """Add Xᵀ X, (K, K)."""
    # The paper's H = 2 X Xᵀ without the factor 2, which cancels in the update.
    return inputs.t() @ inputs if total is None else total.addmm_(inputs.t(), inputs)


@torch.no_grad()
def gptq_weight(
    name: str,
    weight: Tensor,
    hessian: Tensor,
    scheme: Scheme,
    *,
    mask: Tensor | None = None,
    damping: float = 0.01,
    act_order: bool = False,
    fit_scales: bool = False,
) -> tuple[Tensor, Tensor]:
    """Round one weight with GPTQ; return it (N, K) and its scales (R, G).

    Args:
        name: name of the layer, for messages.
        weight: (N, K).
        hessian: (K, K), Xᵀ X of the layer's inputs.
        scheme: quantization scheme.
        mask: (N, K) bool; pruned weights stay zero.
        damping: fraction of the mean of the Hessian's diagonal to add to the diagonal.
        act_order: round the columns with the largest inputs first, with scales of the original
            weight.
        fit_scales: search for the scale of each group with the smallest error.

    Raises:
        CalibrationError: the Hessian cannot be inverted.
    """
    masked = weight.float() if mask is None else weight.float() * mask
    features = masked.shape[1]
    group = scheme.group_of(features)
    is_nested = scheme.super_block is not None
    cost = hessian.diagonal() if fit_scales or is_nested else None  # (K,)
    # Scales of several rows or groups cannot follow the compensation of one group either.
    fixed = _scales(masked, scheme, cost) if act_order or scheme.spans_rows or is_nested else None
    order = torch.arange(features, device=weight.device)
    if act_order:
        order = hessian.diagonal().argsort(descending=True)
    remaining = masked[:, order]  # (N, K), updated with compensations
    inverse = _inverse_root(name, hessian[order][:, order], damping)  # (K, K), upper triangular
    keep = None if mask is None else mask[:, order]
    column_scales, column_zeros = (
        (None, None)
        if fixed is None
        else (
            None if value is None else per_weight(value, masked.shape, scheme)[:, order]
            for value in fixed
        )
    )
    rounded, scales = torch.zeros_like(remaining), []  # scales: one (N, 1) per group
    for start in range(0, features, BLOCK):
        end = min(start + BLOCK, features)
        errors = torch.zeros_like(remaining[:, start:end])  # (N, BLOCK)
        for column in range(start, end):
            col = slice(column, column + 1)
            if column_scales is not None:
                scale = column_scales[:, col]
                zero = None if column_zeros is None else column_zeros[:, col]
            elif column % group == 0:
                # The group may extend beyond this block, whose columns are not yet compensated.
                part = slice(column, column + group)
                group_weight = (
                    remaining[:, part] if keep is None else remaining[:, part] * keep[:, part]
                )
                scale, zero = _scales(group_weight, scheme, None if cost is None else cost[part])
                scales.append(scale)
            value = round_with_scales(remaining[:, col], scale, scheme, zero)
            # A pruned weight changed by earlier compensation is an error too, to be passed on.
            rounded[:, col] = value if keep is None else value * keep[:, col]
            error = (remaining[:, col] - rounded[:, col]) / inverse[column, column]  # (N, 1)
            # compensate within the block
            remaining[:, column:end] -= error * inverse[column, column:end]
            errors[:, column - start] = error.squeeze(1)
        # Lazy batch update (paper, section 3.3): one matmul per block instead of one per column.
        remaining[:, end:] -= errors @ inverse[start:end, end:]
    unpermuted = torch.empty_like(rounded).index_copy_(1, order, rounded)
    return unpermuted.to(weight.dtype), torch.cat(scales, dim=1) if fixed is None else fixed[0]


def _scales(weight: Tensor, scheme: Scheme, cost: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the scheme's scales, or those with the least error weighted by `cost` (K,).

    Returns:
        Scales (R, G) and zero points (R, G); None for a symmetric scheme.
    """
    factor = None if cost is None else best_factor(weight, scheme, cost)
    scales = compute_scales(weight, scheme, factor)
    return scales, compute_zeros(weight, scales, scheme, factor)


def _inverse_root(name: str, hessian: Tensor, damping: float) -> Tensor:
    """Return the upper Cholesky factor of the inverse of the damped Hessian."""
    damped = hessian.clone()
    diagonal = damped.diagonal()
    diagonal[diagonal == 0] = 1.0  # a feature that is always zero
    diagonal += damping * diagonal.mean()
    # Cholesky of the inverse, upper: its rows are the compensation coefficients of each column.
    lower, failed = torch.linalg.cholesky_ex(damped)
    if int(failed) == 0:
        root, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
    if int(failed):
        raise CalibrationError(
            f"{name}: the Hessian of its inputs cannot be inverted with damping {damping}; use more"
            " calibration tokens or a larger damping"
        )
    factor: Tensor = root
    return factor


def factor_of_rounded(
    rounded: Tensor, scales: Tensor, scheme: Scheme, minimums: Tensor | None = None
) -> Tensor:
    """Return the factor for which the scheme's rule gives these scales and minimums.

    If a signed scale has the other sign, no code is -2^(bits-1), so the codes merely change sign.
    """
    if scheme.super_block is not None:
        cells = rounded.float().view(*scales.shape, -1)
        return factor_of(cells, scheme, scales, minimums)
    # Codes times scales: recompute the scheme's own scales from the rounded weight, (R, G). A group
    # of zeros has scale 0, and any factor gives the same codes.
    scheme_scales = compute_scales(rounded, scheme, stored=False)
    ratio = torch.where(scheme_scales == 0, 1.0, (scales / scheme_scales).abs())
    return torch.where((ratio > 0) & ratio.isfinite(), ratio, 1.0).log()
