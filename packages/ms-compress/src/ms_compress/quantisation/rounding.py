"""The arithmetic of schemes: weights to codes and scales, activations to rounded ones.

This is the contract between training and deployment: the fake quantiser calls it in every forward,
and export writes what it returns. Shapes: N rows, K features, G groups of a row, T tokens.
"""

from collections.abc import Callable

import attrs
import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional as F

from ms_compress.quantisation.scheme import Activations, Rounding, Scheme

Reduce = Callable[[Tensor], Tensor]
"""Takes the largest of a tensor over processes that share a row."""
FITS = tuple(percent / 100 for percent in range(70, 111))
"""What a scheme's own scale is multiplied by in search of less error. Shrinking clips the largest
weight to place the others better; where a code is left on one side, growing saves the clipping."""


@frozen(kw_only=True, eq=False)
class Quantised:
    """A weight as a target stores it."""

    codes: Tensor
    """(N, K) int8."""
    scales: Tensor
    """(N, G) in the scheme's scale dtype."""

    def weight(self) -> Tensor:
        """Return what the codes stand for, (N, K) float32."""
        rows, groups = self.scales.shape
        spread = self.codes.view(rows, groups, -1).float() * self.scales.float().unsqueeze(-1)
        return spread.view(rows, -1)


@torch.no_grad()
def quantise(weight: Tensor, scheme: Scheme, factor: Tensor | None = None) -> Quantised:
    """Quantise a weight as the scheme's target stores it.

    Args:
        weight: (N, K) floating.
        scheme: divides K into groups.
        factor: (N, G) float32, the logarithm of what each scale is multiplied by.
    """
    wide = _grouped(weight.float(), scheme.group)
    step, scales = _steps(wide, scheme, factor)
    codes = _round(wide.clone(), step, scheme).to(torch.int8)
    return Quantised(codes=codes.view(weight.shape), scales=scales.squeeze(-1).to(scheme.dtype))


def round_weight(weight: Tensor, scheme: Scheme, factor: Tensor | None = None) -> Tensor:
    """Round a weight to what the target computes with: `quantise(...).weight()` without codes."""
    wide = _grouped(weight.float(), scheme.group)
    step, scales = _steps(wide, scheme, factor)
    out = wide.clone() if weight.dtype == torch.float32 else wide
    return _cast(_round(out, step, scheme).mul_(scales).view(weight.shape), weight.dtype)


@torch.no_grad()
def scales_of(
    weight: Tensor, scheme: Scheme, factor: Tensor | None = None, *, stored: bool = True
) -> Tensor:
    """Return the scheme's own scales of a weight, (N, G) float32.

    Args:
        weight: (N, K) floating.
        scheme: divides K into groups.
        factor: (N, G), the logarithm of what each scale is multiplied by.
        stored: rounded to the scheme's scale dtype.
    """
    raw = attrs.evolve(scheme, scale_dtype="float32") if not stored else scheme
    return _steps(_grouped(weight.float(), scheme.group), raw, factor)[1].squeeze(-1)


@torch.no_grad()
def fitted_factor(weight: Tensor, scheme: Scheme, importance: Tensor | None = None) -> Tensor:
    """Search for the factor of each scale at which rounding errs least, (N, G) float32.

    The least Σ importance · (rounded - weight)² of 41 factors from 0.7 to 1.1, the scheme's own
    scale among them.

    Args:
        weight: (N, K) floating.
        scheme: divides K into groups.
        importance: (K,), what an error of each feature costs; all alike by default.
    """
    own = scales_of(weight, scheme)
    best, least = torch.zeros_like(own), torch.full_like(own, torch.inf)
    for fit in sorted(FITS, key=lambda fit: abs(fit - 1)):  # of equals, the nearest to its own
        factor = torch.full_like(own, fit).log()
        errors = (round_weight(weight, scheme, factor).float() - weight.float()).square_()
        if importance is not None:
            errors *= importance
        error = _grouped(errors, scheme.group).sum(-1)
        better = error < least
        best, least = torch.where(better, factor, best), torch.where(better, error, least)
    return best


@torch.no_grad()
def round_at(weight: Tensor, scales: Tensor, scheme: Scheme) -> Tensor:
    """Round weights (N, C) at given scales (N, 1); return float32."""
    return _round(weight.float().clone(), scales, scheme).mul_(scales)


def scale_gradient(
    weight: Tensor, gradient: Tensor, scheme: Scheme, factor: Tensor
) -> tuple[Tensor, Tensor]:
    """Return gradients of a weight and its scales' factor from that of the rounded weight.

    Learned step sizes (Esser et al. 2020, arXiv:1902.08153, equation 3) of s = s0 · exp(f), where
    s0 is the scheme's own scale, held constant: d/df = s · d/ds. Differences from the paper:
    1. the logarithm is learned, so a step of the optimizer is relative and no scale changes sign;
    2. the gradient is not divided by sqrt(N·high), as AdamW does not see its magnitude.

    Returns:
        (N, K) and (N, G), float32.
    """
    wide = _grouped(weight.float(), scheme.group)
    step, scales = _steps(wide, scheme, factor)
    ratio = _divide(wide.clone(), step, scheme)
    codes = _codes(ratio.clone(), scheme)
    inside = (ratio >= scheme.low - 0.5) & (ratio <= scheme.high + 0.5)
    flow = _grouped(gradient.float(), scheme.group)
    change = codes.sub_(ratio.mul_(inside)).mul_(flow)
    of_factor = change.sum(-1) * scales.squeeze(-1)
    return (flow * inside).view(weight.shape), of_factor


@torch.no_grad()
def round_activations(x: Tensor, how: Activations, largest: Reduce | None = None) -> Tensor:
    """Round an input to what a target computes with.

    Args:
        x: (..., K); a group divides K.
        how: the target's rule.
        largest: where a token's features lie on several processes, the largest over them.
    """
    wide = _grouped(x.float(), how.group)
    out = wide.abs()  # then the only copy: each pass over it costs as much as 3% of a product
    peak = out.amax(-1, keepdim=True)
    if largest is not None and how.group is None:
        peak = largest(peak)
    divisor = torch.full_like(peak, how.divisor)
    scale = peak / divisor
    if how.by_inverse:
        # max / 127 is not 127 / max, and the target has both.
        torch.mul(wide, _finite(divisor / peak), out=out).round_()
    else:
        scale = torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)
        torch.div(wide, scale, out=out).clamp_(how.low, how.high).round_()
    scale = _held_in(scale, getattr(torch, how.scale_dtype))
    return _cast(out.mul_(scale).view(x.shape), x.dtype)


def _held_in(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float32 scales to what a target holds them in."""
    if scales.dtype == dtype:
        return scales
    # Inductor leaves out a cast to less precision and back, but not what is done to its bits.
    bits = scales.to(dtype).view(torch.int16)
    return bits.bitwise_and_(-1).view(dtype).float()


def _finite(inverse: Tensor) -> Tensor:
    """Replace infinite inverses by zero: those of zeros, and of what is too small for a scale."""
    return torch.where(inverse.isfinite(), inverse, 0.0)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to a dtype; a cast to the same would lose the gradient in torch 2.11's compiler."""
    return x if x.dtype == dtype else x.to(dtype)


def _grouped(tensor: Tensor, group: int | None) -> Tensor:
    """View (N, K) as (N, G, group)."""
    width = group or tensor.shape[-1]
    return tensor.reshape(*tensor.shape[:-1], tensor.shape[-1] // width, width)


def _steps(wide: Tensor, scheme: Scheme, factor: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the steps that codes count in, and the stored scales, both (N, G, 1) float32."""
    peak = _peak(wide, scheme)
    # By a tensor: a GPU multiplies by a number's inverse, which is another scale in its last bit.
    step = peak.div_(torch.full_like(peak, scheme.divisor))
    if factor is not None:
        step = step * factor.float().exp().unsqueeze(-1)
    if scheme.eps_for_zeros:
        step = torch.where(step == 0, torch.finfo(step.dtype).eps, step)
    scales = _held_in(step, scheme.dtype)
    # A learned scale has no unrounded twin in the target: its codes are counted in what is stored.
    return (step if scheme.exact_step and factor is None else scales), scales


def _peak(wide: Tensor, scheme: Scheme) -> Tensor:
    """Return each group's value of largest magnitude, (N, G, 1)."""
    # Two reductions take a ninth of the time of aminmax, or of the norm, over so few neighbours.
    low, high = wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True)
    if not scheme.signed_peak:
        return torch.maximum(high, low.neg_())
    tied = high == -low
    peak = torch.where(high > -low, high, low)
    # MLAS takes the lower of two that are equally far, ggml the first.
    # Looked for first where that is cheap: in a compiled graph it would break the graph.
    if scheme.first_peak and (torch.compiler.is_compiling() or bool((tied & (high > 0)).any())):
        first = wide.gather(-1, wide.abs().argmax(-1, keepdim=True))
        peak = torch.where(tied, first, peak)
    return peak


def _divide(wide: Tensor, step: Tensor, scheme: Scheme) -> Tensor:
    """Divide weights by the step, in place."""
    if not scheme.by_inverse:
        return wide.div_(step)
    return wide.mul_(_finite(step.reciprocal()))


def _round(wide: Tensor, step: Tensor, scheme: Scheme) -> Tensor:
    """Turn weights into codes as float32, in place."""
    return _codes(_divide(wide, step, scheme), scheme)


def _codes(ratio: Tensor, scheme: Scheme) -> Tensor:
    """Turn weights in units of the step into codes as float32, in place."""
    if scheme.rounding == "away_from_low":
        ratio.sub_(scheme.low)
        return _nearest(ratio, "away").clamp_(0, scheme.high - scheme.low).add_(scheme.low)
    if scheme.rounding == "up":
        half = 0.5 - scheme.low
        return ratio.add_(half).floor_().clamp_(0, scheme.high - scheme.low).add_(scheme.low)
    if scheme.rounding == "even":
        # A group's lowest weight, if no other is as far from zero, lies on this border exactly. Its
        # code is the even one however the quotient was rounded: else one bit of a weight, such as
        # another order of summing leaves, would move it by a whole step.
        border = (scheme.low + 0.5) * (1 - 2**-20)
        ratio = F.threshold(ratio, border, scheme.low, inplace=True)
        return ratio.clamp_(max=scheme.high).round_()
    return _nearest(ratio, scheme.rounding).clamp_(scheme.low, scheme.high)


def _nearest(ratio: Tensor, rounding: Rounding) -> Tensor:
    if rounding == "even":
        return ratio.round_()
    whole = ratio.trunc()
    # The rest is exact, and so is twice the rest: adding ½ to the ratio itself would not be.
    return ratio.sub_(whole).mul_(2.0).trunc_().add_(whole)
