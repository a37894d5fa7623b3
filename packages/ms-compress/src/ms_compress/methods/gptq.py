"""GPTQ: weights rounded one column after another, the error of each made up for by the rest.

Frantar et al. 2022, arXiv:2210.17323, algorithm 1. Differences from the paper:
1. Scales of a group are those of the target's own rule, or fitted ones, taken when the group is
   reached; what an error costs is then the diagonal of the Hessian.
2. In the order of use (act_order) a group's columns are met far apart, so its scale is that of
   the weight as it was.
Shapes: N rows, K features.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor, nn

from ms_compress.errors import CalibrationError
from ms_compress.methods.calibration import check_calibration, walk
from ms_compress.methods.gptq_by_loss import output_squares, round_by_loss
from ms_compress.methods.qat import qat
from ms_compress.models.selection import select
from ms_compress.quantisation.layers import FACTOR, Prepared, prepared_layers
from ms_compress.quantisation.rounding import best_factor, compute_scales, round_with_scales
from ms_compress.quantisation.scheme import Scheme
from ms_compress.settings import number

BLOCK = 128
"""Columns whose errors are gathered before the rest is updated."""
CELL = 0.45
"""How far a weight may lie from the middle of its code and be sure to keep it, in scales."""


def gptq(
    model: nn.Module,
    scheme_name: str | Scheme,
    batches: Sequence[Tensor],
    *,
    exceptions: Sequence[str] = (),
    activations: bool = True,
    damping: float = 0.01,
    act_order: bool = False,
    by_loss: bool = False,
    fit_scales: bool = False,
    for_training: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> None:
    """Prepare a model for a scheme and round its weights by GPTQ, in place.

    Args:
        model: a whole decoder of ms-parallel or transformers; masks are kept.
        scheme_name: such as `"ct.int4_g32"`.
        batches: calibration tokens, (B, S) int64 each.
        exceptions: patterns of names of layers that stay as they are.
        activations: also round inputs, where the target does.
        damping: share of the mean of the Hessian's diagonal that is added to it.
        act_order: round columns of the largest inputs first; each keeps its place and its group's
            scale, so the file is as without.
        by_loss: count an error by what it does to the model's predictions, not to the layer's
            output, in order of use (see `gptq_by_loss`); takes a forward and a backward of the
            whole model for each decoder layer.
        fit_scales: search for the scale of each group that errs least.
        for_training: leave each weight as near to what it was as its code allows, not in the middle
            of what is rounded to that code, from where a small rate of learning hardly moves it.
        progress: called with the decoder layers that are done, from none on, and all there are.

    Raises:
        ConfigError: damping is not above 0, or an exception matches nothing.
        LayerError: the model is no decoder that we know, or a layer cannot be taken.
        CalibrationError: there are no tokens or a weight is not finite, and the model is as it was;
            or a layer's input is not finite, and layers before it are rounded already.
    """
    rounding = _Rounding(
        model=model,
        batches=batches,
        damping=damping,
        act_order=act_order,
        by_loss=by_loss,
        fit_scales=fit_scales,
        for_training=for_training,
    )
    check_calibration(model, batches, {name for name, _ in select(model, exceptions)})
    qat(model, scheme_name, exceptions=exceptions, activations=activations, learned_scales=True)
    wanted = {name for name, layer in prepared_layers(model) if layer.scheme is not None}
    walk(model, batches, _add_square, rounding.visit, wanted, rounding.begin, progress)


@frozen(kw_only=True, eq=False)
class _Rounding:
    """Rounds one linear layer after another, as `walk` visits them; fields are those of `gptq`."""

    model: nn.Module
    batches: Sequence[Tensor]
    damping: float = field(validator=number(least=1e-12))
    act_order: bool
    by_loss: bool
    fit_scales: bool
    for_training: bool
    output_hessians: dict[str, Tensor] = field(factory=dict, init=False)
    """By layer, where errors are counted by the loss."""

    def begin(self, layers: Mapping[str, nn.Linear]) -> None:
        """Take what the loss makes of the outputs of a decoder layer's linear layers."""
        self.output_hessians.clear()
        if self.by_loss:
            self.output_hessians.update(output_squares(self.model, layers, self.batches))

    def visit(self, name: str, layer: nn.Linear, hessian: Tensor) -> None:
        """Round a layer's weight, in place."""
        assert isinstance(layer, Prepared)
        assert layer.scheme is not None
        weight, scales = self._rounded(name, layer, layer.scheme, hessian)
        if self.for_training:
            before = layer.weight.detach()
            kept = before if layer.mask is None else before * layer.mask
            weight = _nearest_of_code(kept, weight, scales)
        layer.weight.copy_(weight)
        layer.get_parameter(FACTOR).copy_(_factor(layer.weight.detach(), scales, layer.scheme))

    def _rounded(
        self, name: str, layer: Prepared, scheme: Scheme, hessian: Tensor
    ) -> tuple[Tensor, Tensor]:
        weight, outputs = layer.weight.detach(), self.output_hessians.get(name)
        options: dict[str, Any] = {
            "mask": layer.mask,
            "damping": self.damping,
            "fit_scales": self.fit_scales,
        }
        if outputs is None:
            return gptq_weight(name, weight, hessian, scheme, act_order=self.act_order, **options)
        return round_by_loss(name, weight, hessian, outputs, scheme, **options)


def _add_square(held: Tensor | None, inputs: Tensor) -> Tensor:
    """Add up Xᵀ X, (K, K)."""
    return inputs.t() @ inputs if held is None else held.addmm_(inputs.t(), inputs)


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
    """Round one weight by GPTQ; return it (N, K) and the scales (N, G) that it was rounded at.

    Args:
        name: of the layer, for messages.
        weight: (N, K).
        hessian: (K, K), Xᵀ X of its inputs.
        scheme: the target's.
        mask: (N, K) bool; pruned weights stay zero.
        damping: share of the mean of the diagonal that is added to it.
        act_order: columns of the largest inputs first, on scales of the weight as it was.
        fit_scales: search for the scale of each group that errs least.

    Raises:
        CalibrationError: the Hessian cannot be inverted.
    """
    kept = weight.float() if mask is None else weight.float() * mask
    features = kept.shape[1]
    group = scheme.group_of(features)
    cost = hessian.diagonal() if fit_scales else None
    fixed = _scales(kept, scheme, cost) if act_order else None
    order = torch.arange(features, device=weight.device)
    if act_order:
        order = hessian.diagonal().argsort(descending=True)
    left = kept[:, order]
    inverse = _inverse_root(name, hessian[order][:, order], damping)
    stays = None if mask is None else mask[:, order]
    spread = None if fixed is None else fixed.repeat_interleave(group, dim=1)[:, order]
    rounded, scales = torch.zeros_like(left), []
    for first in range(0, features, BLOCK):
        last = min(first + BLOCK, features)
        errors = torch.zeros_like(left[:, first:last])
        for column in range(first, last):
            if spread is None and column % group == 0:
                # The group may go on beyond this block, where errors are not yet made up for.
                part = slice(column, column + group)
                ahead = left[:, part] if stays is None else left[:, part] * stays[:, part]
                scales.append(_scales(ahead, scheme, None if cost is None else cost[part]))
            here = slice(column, column + 1)
            scale = scales[-1] if spread is None else spread[:, here]
            value = round_with_scales(left[:, here], scale, scheme)
            # What earlier errors have made of a pruned weight is an error too, and handed on.
            rounded[:, here] = value if stays is None else value * stays[:, here]
            error = (left[:, here] - rounded[:, here]) / inverse[column, column]
            left[:, column:last] -= error * inverse[column, column:last]
            errors[:, column - first] = error.squeeze(1)
        left[:, last:] -= errors @ inverse[first:last, last:]
    placed = torch.empty_like(rounded).index_copy_(1, order, rounded)
    return placed.to(weight.dtype), torch.cat(scales, dim=1) if fixed is None else fixed


def _scales(weight: Tensor, scheme: Scheme, cost: Tensor | None) -> Tensor:
    """Return the scheme's own scales, or those that err least at a cost (K,) a feature; (N, G)."""
    factor = None if cost is None else best_factor(weight, scheme, cost)
    return compute_scales(weight, scheme, factor)


def _inverse_root(name: str, hessian: Tensor, damping: float) -> Tensor:
    """Return the upper Cholesky factor of the damped Hessian's inverse."""
    damped = hessian.clone()
    diagonal = damped.diagonal()
    diagonal[diagonal == 0] = 1.0  # a feature that is never used
    diagonal += damping * diagonal.mean()
    lower, failed = torch.linalg.cholesky_ex(damped)
    if int(failed) == 0:
        root, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
    if int(failed):
        raise CalibrationError(
            f"{name}: the Hessian of its inputs cannot be inverted at damping {damping}; use more"
            " calibration tokens or more damping"
        )
    whole: Tensor = root
    return whole


def _nearest_of_code(weight: Tensor, rounded: Tensor, scales: Tensor) -> Tensor:
    """Move weights (N, K) no further than for each to be rounded to its given code."""
    reach = CELL * scales.abs().repeat_interleave(weight.shape[1] // scales.shape[1], dim=1)
    return weight.clamp(rounded - reach, rounded + reach).to(weight.dtype)


def _factor(rounded: Tensor, scales: Tensor, scheme: Scheme) -> Tensor:
    """Return the factor that turns the scheme's own scales into those of the rounding.

    Where the sign of a signed scale differs, no code is -2^(bits-1), so codes merely change sign.
    """
    own = compute_scales(rounded, scheme, stored=False)
    ratio = torch.where(own == 0, 1.0, (scales / own).abs())
    return torch.where((ratio > 0) & ratio.isfinite(), ratio, 1.0).log()
