"""Rounding arithmetic of schemes: quantize weights to codes and scales, and round activations.

Training and deployment share this code: the fake quantizer calls it in every forward, and export
writes its results. Shapes: N rows, K features, G groups per row, T tokens.
"""

from collections.abc import Callable

import attrs
import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional as F

from ms_compress.quantization.scheme import Activations, Rounding, Scheme

Reduce = Callable[[Tensor], Tensor]
"""Elementwise maximum of a tensor over the processes that share a row."""
SCALE_MULTIPLIERS = tuple(percent / 100 for percent in range(70, 111))
"""Multipliers tried on a scheme's own scale. Shrinking clips the largest weight to represent the
others better; if one side has an unused code, growing avoids the clipping."""


@frozen(kw_only=True, eq=False)
class QuantizedWeight:
    """A weight as stored by a target."""

    codes: Tensor
    """(N, K) int8."""
    scales: Tensor
    """(N, G) in the scheme's scale dtype."""

    def weight(self) -> Tensor:
        """Return the dequantized weight, (N, K) float32."""
        rows, groups = self.scales.shape
        dequantized = self.codes.view(rows, groups, -1).float() * self.scales.float().unsqueeze(-1)
        return dequantized.view(rows, -1)


@torch.no_grad()
def quantize_weight(
    weight: Tensor, scheme: Scheme, factor: Tensor | None = None
) -> QuantizedWeight:
    """Quantize a weight as the scheme's target stores it.

    Args:
        weight: (N, K) floating point.
        scheme: quantization scheme, whose group divides K.
        factor: (N, G) float32, logarithm of a multiplier on each scale.
    """
    groups = _grouped(weight.float(), scheme.group)
    step, scales = _steps(groups, scheme, factor)
    codes = _round(groups.clone(), step, scheme).to(torch.int8)  # (N, G, group)
    return QuantizedWeight(
        codes=codes.view(weight.shape), scales=scales.squeeze(-1).to(scheme.dtype)
    )


def round_weight(weight: Tensor, scheme: Scheme, factor: Tensor | None = None) -> Tensor:
    """Round a weight to the target's values: `quantize_weight(...).weight()` without the codes."""
    groups = _grouped(weight.float(), scheme.group)
    step, scales = _steps(groups, scheme, factor)
    # `float()` of a float32 weight is the weight itself, which the rounding below must not change.
    out = groups.clone() if weight.dtype == torch.float32 else groups
    return _cast(_round(out, step, scheme).mul_(scales).view(weight.shape), weight.dtype)


@torch.no_grad()
def compute_scales(
    weight: Tensor, scheme: Scheme, factor: Tensor | None = None, *, stored: bool = True
) -> Tensor:
    """Return the scheme's scales of a weight, (N, G) float32.

    Args:
        weight: (N, K) floating point.
        scheme: quantization scheme, whose group divides K.
        factor: (N, G), logarithm of a multiplier on each scale.
        stored: round the scales to the scheme's scale dtype.
    """
    scale_scheme = attrs.evolve(scheme, scale_dtype="float32") if not stored else scheme
    return _steps(_grouped(weight.float(), scheme.group), scale_scheme, factor)[1].squeeze(-1)


@torch.no_grad()
def best_factor(weight: Tensor, scheme: Scheme, importance: Tensor | None = None) -> Tensor:
    """Search for the factor of each scale with the smallest rounding error, (N, G) float32.

    Minimizes Σ importance · (rounded - weight)² over 41 multipliers from 0.7 to 1.1, which include
    the scheme's own scale.

    Args:
        weight: (N, K) floating point.
        scheme: quantization scheme, whose group divides K.
        importance: (K,) weight of each feature's squared error. None: all 1.
    """
    scales = compute_scales(weight, scheme)
    best, least_error = torch.zeros_like(scales), torch.full_like(scales, torch.inf)  # (N, G)
    for multiplier in sorted(SCALE_MULTIPLIERS, key=lambda m: abs(m - 1)):  # ties: closest to 1
        factor = torch.full_like(scales, multiplier).log()
        errors = (round_weight(weight, scheme, factor).float() - weight.float()).square_()
        if importance is not None:
            errors *= importance
        error = _grouped(errors, scheme.group).sum(-1)  # (N, G)
        is_better = error < least_error
        best, least_error = (
            torch.where(is_better, factor, best),
            torch.where(is_better, error, least_error),
        )
    return best


@torch.no_grad()
def round_with_scales(weight: Tensor, scales: Tensor, scheme: Scheme) -> Tensor:
    """Round weights (N, C) with given scales (N, 1); returns float32."""
    return _round(weight.float().clone(), scales, scheme).mul_(scales)


def scale_gradient(
    weight: Tensor, gradient: Tensor, scheme: Scheme, factor: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of a weight and its scales' factor from the rounded weight's gradient.

    Learned step size quantization (Esser et al. 2020, arXiv:1902.08153, equation 3) with
    s = s0 · exp(f), where s0 is the scheme's own scale, held constant: d/df = s · d/ds.
    Differences from the paper:
    1. the logarithm is learned, so an optimizer step is relative and scales keep their sign;
    2. the gradient is not divided by sqrt(N·high), as AdamW is invariant to its magnitude.

    Returns:
        (N, K) and (N, G), float32.
    """
    groups = _grouped(weight.float(), scheme.group)
    step, scales = _steps(groups, scheme, factor)  # (N, G, 1)
    ratio = _divide(groups.clone(), step, scheme)  # (N, G, group)
    codes = _codes(ratio.clone(), scheme)
    inside = (ratio >= scheme.low - 0.5) & (ratio <= scheme.high + 0.5)
    grad_groups = _grouped(gradient.float(), scheme.group)
    # Equation 3: d rounded / d s is round(v/s) - v/s inside the range and the end code outside.
    grad_ratio = codes.sub_(ratio.mul_(inside)).mul_(grad_groups)
    grad_factor = grad_ratio.sum(-1) * scales.squeeze(-1)
    return (grad_groups * inside).view(weight.shape), grad_factor


@torch.no_grad()
def round_activations(x: Tensor, rule: Activations, reduce_max: Reduce | None = None) -> Tensor:
    """Round an input to the target's values.

    Args:
        x: (..., K); the group divides K.
        rule: the target's activation rounding.
        reduce_max: maximum over the processes, if a token's features are split over several.
    """
    groups = _grouped(x.float(), rule.group)
    out = groups.abs()  # the only copy, reused below: each pass costs up to 3% of a matmul
    peak = out.amax(-1, keepdim=True)  # (..., groups, 1)
    if reduce_max is not None and rule.group is None:
        peak = reduce_max(peak)
    divisor = torch.full_like(peak, rule.divisor)
    scale = peak / divisor
    if rule.by_inverse:
        # The target computes both max / 127 and 127 / max, which are not exact inverses.
        torch.mul(groups, _finite(divisor / peak), out=out).round_()
    else:
        scale = torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)
        torch.div(groups, scale, out=out).clamp_(rule.low, rule.high).round_()
    scale = _round_to_dtype(scale, getattr(torch, rule.scale_dtype))
    return _cast(out.mul_(scale).view(x.shape), x.dtype)


def _round_to_dtype(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float32 scales to the dtype in which a target stores them."""
    if scales.dtype == dtype:
        return scales
    # Inductor removes a cast to lower precision and back, but not an operation on the bits.
    bits = scales.to(dtype).view(torch.int16)
    return bits.bitwise_and_(-1).view(dtype).float()


def _finite(inverse: Tensor) -> Tensor:
    """Replace infinite inverses (of zero and of tiny values) by zero."""
    return torch.where(inverse.isfinite(), inverse, 0.0)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to a dtype; a cast to the same dtype loses the gradient in torch 2.11's compiler."""
    return x if x.dtype == dtype else x.to(dtype)


def _grouped(tensor: Tensor, group: int | None) -> Tensor:
    """View (N, K) as (N, G, group)."""
    width = group or tensor.shape[-1]
    return tensor.reshape(*tensor.shape[:-1], tensor.shape[-1] // width, width)


def _steps(groups: Tensor, scheme: Scheme, factor: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the steps that codes count, and the stored scales, both (N, G, 1) float32."""
    peak = _peak(groups, scheme)
    # Divide by a tensor: for a number, a GPU multiplies by its inverse, which can differ in a bit.
    step = peak.div_(torch.full_like(peak, scheme.divisor))
    if factor is not None:
        step = step * factor.float().exp().unsqueeze(-1)
    if scheme.eps_for_zeros:
        step = torch.where(step == 0, torch.finfo(step.dtype).eps, step)
    scales = _round_to_dtype(step, scheme.dtype)
    # The target has no unrounded version of a learned scale, so codes use the stored one.
    return (step if scheme.exact_step and factor is None else scales), scales


def _peak(groups: Tensor, scheme: Scheme) -> Tensor:
    """Return the value of largest magnitude in each group, (N, G, 1)."""
    # For such small groups, two reductions take a ninth of the time of aminmax or of the norm.
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    if not scheme.signed_peak:
        return torch.maximum(high, low.neg_())
    tied = high == -low
    peak = torch.where(high > -low, high, low)
    # Of two values equally far from zero, MLAS takes the lower one and ggml the first. The test for
    # ties is skipped in a compiled graph, which it would break.
    if scheme.first_peak and (torch.compiler.is_compiling() or bool((tied & (high > 0)).any())):
        first = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
        peak = torch.where(tied, first, peak)
    return peak


def _divide(groups: Tensor, step: Tensor, scheme: Scheme) -> Tensor:
    """Divide weights by the step, in place."""
    if not scheme.by_inverse:
        return groups.div_(step)
    return groups.mul_(_finite(step.reciprocal()))


def _round(groups: Tensor, step: Tensor, scheme: Scheme) -> Tensor:
    """Convert weights to codes as float32, in place."""
    return _codes(_divide(groups, step, scheme), scheme)


def _codes(ratio: Tensor, scheme: Scheme) -> Tensor:
    """Convert weights in units of the step to codes as float32, in place."""
    if scheme.rounding == "away_from_low":
        ratio.sub_(scheme.low)
        return _nearest(ratio, "away").clamp_(0, scheme.high - scheme.low).add_(scheme.low)
    if scheme.rounding == "up":
        half = 0.5 - scheme.low
        return ratio.add_(half).floor_().clamp_(0, scheme.high - scheme.low).add_(scheme.low)
    if scheme.rounding == "even":
        # A group's lowest weight lies exactly on this border if no other is as far from zero. Force
        # the even code however the quotient was rounded; otherwise a difference of one bit in a
        # weight, as from another summation order, would move it by a whole step.
        border = (scheme.low + 0.5) * (1 - 2**-20)
        ratio = F.threshold(ratio, border, scheme.low, inplace=True)
        return ratio.clamp_(max=scheme.high).round_()
    return _nearest(ratio, scheme.rounding).clamp_(scheme.low, scheme.high)


def _nearest(ratio: Tensor, rounding: Rounding) -> Tensor:
    if rounding == "even":
        return ratio.round_()
    integer = ratio.trunc()
    # The remainder is exact, and so is twice the remainder; adding 1/2 to the ratio is not.
    return ratio.sub_(integer).mul_(2.0).trunc_().add_(integer)
