"""Rounding arithmetic of schemes: quantize weights to codes and scales, and round activations.

Training and deployment share this code: the fake quantizer calls it in every forward, and export
writes its results. A cell is a set of weights that share a scale.
Shapes: N rows, K features, T tokens; R by G cells, which are N by G for groups of a row.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional as F

from ms_compress.quantization import super_blocks
from ms_compress.quantization.elements import (
    binade,
    power_of_two_scale,
    round_to_format,
    round_to_power_of_two,
)
from ms_compress.quantization.scheme import E4M3, Activations, Rounding, Scheme
from ms_compress.quantization.super_blocks import SuperScales

Reduce = Callable[[Tensor], Tensor]
"""Elementwise maximum of a tensor over the processes that share a row."""
SCALE_MULTIPLIERS = tuple(percent / 100 for percent in range(70, 111))
"""Multipliers tried on a scheme's own scale. Shrinking clips the largest weight to represent the
others better; if one side has an unused code, growing avoids the clipping."""
CODE_MARGIN = 0.45
"""Largest distance of a weight from its code, in steps, at which it reliably rounds to that
code."""
EPS_E4M3 = 0.125
"""Scale of an all-zero group in E4M3, as in compressed-tensors."""


@frozen(kw_only=True, eq=False)
class QuantizedWeight:
    """A weight as stored by a target."""

    scheme: Scheme
    codes: Tensor
    """(N, K) in the scheme's code dtype."""
    scales: Tensor
    """(R, G) in the scheme's scale dtype; see `Scheme.scale_shape`."""
    zeros: Tensor | None = None
    """(R, G) int8 zero points of an asymmetric scheme, or integer minimums of super-blocks."""
    global_scale: Tensor | None = None
    """(1,) float32 divisor of all scales, for strategy `tensor_group`."""
    super_scales: Tensor | None = None
    """(R, S) float16 scales of super-blocks; see `SuperScales`."""

    @property
    def row_parts(self) -> dict[str, Any]:
        """The tensors with a row per row of the weight, by field."""
        parts = {
            "codes": self.codes,
            "scales": self.scales,
            "zeros": self.zeros,
            "super_scales": self.super_scales,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def weight(self) -> Tensor:
        """Return the dequantized weight, (N, K) float32."""
        rule = self.scheme.super_block
        if rule is not None:
            assert self.super_scales is not None
            stored = SuperScales(self.scales, self.zeros, self.super_scales)
            cells = _cells(self.codes.float(), self.scheme) * stored.scales(rule).unsqueeze(-1)
            minimums = stored.minimums(rule)
            if minimums is not None:
                cells = cells - minimums.unsqueeze(-1)
            return _from_cells(cells, self.codes.shape, self.scheme)
        scales = self.scales.float().unsqueeze(-1)  # (R, G, 1)
        if self.global_scale is not None:
            scales = scales / self.global_scale
        multiples = _cells(self.codes.float(), self.scheme)  # (R, G, cell)
        if self.zeros is not None:
            multiples = multiples - self.zeros.unsqueeze(-1)
        return _from_cells(multiples * scales, self.codes.shape, self.scheme)


class _Grid(NamedTuple):
    """Values that the codes of each cell stand for: multiples of a scale."""

    step: Tensor
    """(R, G, 1) float32, by which weights are divided to get codes."""
    scales: Tensor
    """(R, G, 1) float32, by which codes are multiplied; after rounding to the scale dtype."""
    zeros: Tensor | None
    """(R, G, 1) float32 zero points of an asymmetric scheme."""
    global_scale: Tensor | None
    """(1,) float32, by which stored scales are divided."""
    minimums: Tensor | None = None
    """(R, G, 1) float32, subtracted from codes times scales."""
    super_scales: SuperScales | None = None
    """Scales and minimums as stored, of a scheme with super-blocks."""


@torch.no_grad()
def quantize_weight(
    weight: Tensor, scheme: Scheme, factor: Tensor | None = None
) -> QuantizedWeight:
    """Quantize a weight as the scheme's target stores it.

    Args:
        weight: (N, K) floating point.
        scheme: quantization scheme, whose group divides K.
        factor: (R, G) float32, logarithm of a multiplier on each scale.
    """
    cells = _cells(weight.float(), scheme)
    grid = _grid(cells, scheme, factor)
    codes = _round(cells.clone(), grid.step, scheme, grid.zeros, grid.minimums)
    if grid.super_scales is not None:
        return QuantizedWeight(
            scheme=scheme,
            codes=_from_cells(codes, weight.shape, scheme).to(scheme.code_dtype),
            scales=grid.super_scales.scale_codes,
            zeros=grid.super_scales.minimum_codes,
            super_scales=grid.super_scales.super_scales,
        )
    if grid.zeros is not None:
        codes.add_(grid.zeros)
    stored = grid.scales if grid.global_scale is None else grid.scales * grid.global_scale
    return QuantizedWeight(
        scheme=scheme,
        codes=_from_cells(codes, weight.shape, scheme).to(scheme.code_dtype),
        scales=stored.squeeze(-1).to(scheme.dtype),
        zeros=None if grid.zeros is None else grid.zeros.squeeze(-1).to(torch.int8),
        global_scale=grid.global_scale,
    )


def round_weight(weight: Tensor, scheme: Scheme, factor: Tensor | None = None) -> Tensor:
    """Round a weight to the target's values: `quantize_weight(...).weight()` without the codes."""
    cells = _cells(weight.float(), scheme)  # (R, G, weights per scale)
    grid = _grid(cells, scheme, factor)
    # `float()` of a float32 weight is the weight itself, which the rounding below must not change.
    out = cells.clone() if weight.dtype == torch.float32 else cells
    rounded = _round(out, grid.step, scheme, grid.zeros, grid.minimums).mul_(grid.scales)
    if grid.minimums is not None:
        rounded.sub_(grid.minimums)
    return _cast(_from_cells(rounded, weight.shape, scheme), weight.dtype)


@torch.no_grad()
def compute_scales(
    weight: Tensor, scheme: Scheme, factor: Tensor | None = None, *, stored: bool = True
) -> Tensor:
    """Return the scheme's scales of a weight, (R, G) float32.

    Args:
        weight: (N, K) floating point.
        scheme: quantization scheme, whose group divides K.
        factor: (R, G), logarithm of a multiplier on each scale.
        stored: round the scales to the scheme's scale dtype.
    """
    cells = _cells(weight.float(), scheme)
    if scheme.super_block is not None and not stored:
        return super_blocks.plain_scales(cells, scheme, factor)[0]
    if not stored:
        return _plain_step(_peak(cells, scheme), scheme, factor).squeeze(-1)
    return _grid(cells, scheme, factor).scales.squeeze(-1)


@torch.no_grad()
def compute_zeros(
    weight: Tensor, scales: Tensor, scheme: Scheme, factor: Tensor | None = None
) -> Tensor | None:
    """Return the zero points for given scales (R, G), as float32; None for a symmetric scheme.

    A scheme with super-blocks has minimums instead, which `round_with_scales` takes too; they
    depend on the factor.
    """
    if scheme.symmetric:
        return None
    if scheme.super_block is not None:
        minimums = _grid(_cells(weight.float(), scheme), scheme, factor).minimums
        return None if minimums is None else minimums.squeeze(-1)
    return _zeros(_cells(weight.float(), scheme), scales.unsqueeze(-1), scheme).squeeze(-1)


def per_weight(scales: Tensor, shape: torch.Size, scheme: Scheme) -> Tensor:
    """Expand scales (R, G) to one per weight, (N, K)."""
    size = shape.numel() if scheme.strategy == "tensor" else scheme.group_of(shape[1])
    if scheme.block_structure is not None:
        size *= scheme.block_structure[0]
    return _from_cells(scales.unsqueeze(-1).expand(*scales.shape, size), shape, scheme)


@torch.no_grad()
def best_factor(weight: Tensor, scheme: Scheme, importance: Tensor | None = None) -> Tensor:
    """Search for the factor of each scale with the smallest rounding error, (R, G) float32.

    Minimizes Σ importance · (rounded - weight)² over 41 multipliers from 0.7 to 1.1, which include
    the scheme's own scale. For super-blocks see `super_blocks.fit`; the result has the shape of
    `Scheme.factor_shape`.

    Args:
        weight: (N, K) floating point.
        scheme: quantization scheme, whose group divides K.
        importance: (K,) weight of each feature's squared error; or (K, K) second moment of the
            inputs, for the squared error of a group's part of the output. None: all 1.
    """
    if scheme.super_block is not None:
        cells = _cells(weight.float(), scheme)
        # Super-blocks ignore correlations between inputs, as llama.cpp's importance matrix does.
        if importance is not None and importance.ndim == 2:
            importance = importance.diagonal()
        costs = torch.ones(()) if importance is None else _cells(importance[None], scheme)
        return super_blocks.fit(cells, scheme, costs.to(cells))
    if importance is not None and importance.ndim == 2:
        if scheme.scale_shape(*weight.shape)[0] == weight.shape[0]:
            group = scheme.group_of(weight.shape[1])
            # (G, group, group): the blocks on the diagonal, one per group of features.
            count = weight.shape[1] // group
            blocks = importance.view(count, group, count, group)
            importance = blocks.diagonal(dim1=0, dim2=2).movedim(-1, 0)
        else:  # scales of several rows
            importance = importance.diagonal()
    scales = compute_scales(weight, scheme)
    best, least_error = torch.zeros_like(scales), torch.full_like(scales, torch.inf)  # (R, G)
    for multiplier in sorted(SCALE_MULTIPLIERS, key=lambda m: abs(m - 1)):  # ties: closest to 1
        factor = torch.full_like(scales, multiplier).log()
        errors = round_weight(weight, scheme, factor).float() - weight.float()
        if importance is not None and importance.ndim == 3:
            cells = _cells(errors, scheme).transpose(0, 1)  # (G, N, group)
            error = (cells @ importance * cells).sum(-1).t()  # e H eᵀ of each group, (R, G)
        else:
            errors = errors.square() if importance is None else errors.square() * importance
            error = _cells(errors, scheme).sum(-1)  # (R, G)
        is_better = error < least_error
        best, least_error = (
            torch.where(is_better, factor, best),
            torch.where(is_better, error, least_error),
        )
    return best


@torch.no_grad()
def round_with_scales(
    weight: Tensor, scales: Tensor, scheme: Scheme, zeros: Tensor | None = None
) -> Tensor:
    """Round weights (N, C) with given scales and zero points (N, 1); returns float32.

    With super-blocks, `zeros` are the minimums of `compute_zeros`.
    """
    cells = weight.float().clone()
    if scheme.super_block is None or zeros is None:
        return _round(cells, scales, scheme, zeros).mul_(scales)
    return _round(cells, scales, scheme, None, zeros).mul_(scales).sub_(zeros)


def sum_per_scale(values: Tensor, scheme: Scheme) -> Tensor:
    """Return the sums (R, G) of values (N, K) that belong to the same scale."""
    return _cells(values, scheme).sum(-1)


def code_spacing(weight: Tensor, scales: Tensor, scheme: Scheme) -> Tensor:
    """Return the distance between the codes around each weight, (N, K), as a weight.

    Args:
        weight: (N, K).
        scales: (N, K), the scale of each weight.
        scheme: quantization scheme.
    """
    if scheme.values is not None:
        values = torch.tensor(scheme.values, dtype=torch.float32, device=weight.device)
        upper = torch.bucketize(weight / scales, values).clamp_(1, len(values) - 1)
        return (values[upper] - values[upper - 1]) * scales.abs()
    if scheme.element is None:
        return scales.abs()
    magnitude = (weight / scales).abs().nan_to_num_(0.0).clamp_(max=scheme.element.high)
    power = binade(magnitude).clamp_(min=2.0**scheme.element.min_exponent)
    return power * scales.abs() * 2.0**-scheme.element.mantissa_bits


def clamp_to_codes(weight: Tensor, rounded: Tensor, scales: Tensor, scheme: Scheme) -> Tensor:
    """Move weights just far enough to round to given codes.

    Args:
        weight: (N, K).
        rounded: (N, K) codes times scales.
        scales: (N, K), the scale of each weight.
        scheme: quantization scheme.
    """
    outer = inner = CODE_MARGIN * scales.abs()  # away from zero, and towards it
    if scheme.element is not None:
        # Floating-point codes are farther apart the larger they are: below a power of two, half as
        # far as above it.
        magnitude = (rounded / scales).abs()
        smallest = torch.full_like(magnitude, 2.0**scheme.element.min_exponent)
        power = torch.maximum(binade(magnitude), smallest)
        outer = outer * power * 2.0**-scheme.element.mantissa_bits
        inner = torch.where((magnitude == power) & (power > smallest), outer / 2, outer)
    is_positive = rounded > 0
    low = rounded - torch.where(is_positive, inner, outer)
    high = rounded + torch.where(is_positive, outer, inner)
    return weight.clamp(low, high).to(weight.dtype)


def scale_gradient(
    weight: Tensor, gradient: Tensor, scheme: Scheme, factor: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of a weight and its scales' factor from the rounded weight's gradient.

    Learned step size quantization (Esser et al. 2020, arXiv:1902.08153, equation 3) with
    s = s0 · exp(f), where s0 is the scheme's own scale, held constant: d/df = s · d/ds.
    Differences from the paper:
    1. the logarithm is learned, so an optimizer step is relative and scales keep their sign;
    2. the gradient is not divided by sqrt(N·high), as AdamW is invariant to its magnitude;
    3. minimums of super-blocks move in units of their group's range, held constant too, and get a
       gradient from the weights beyond the range only. Rounding of scales to integers passes it on.

    Returns:
        (N, K) and the shape of the factor, float32.
    """
    cells = _cells(weight.float(), scheme)
    step, scales, zeros, _, minimums, _ = _grid(cells, scheme, factor)  # (R, G, 1)
    shifted = cells.clone() if minimums is None else cells + minimums
    ratio = _divide(shifted, step, scheme)  # (R, G, cell)
    codes = _codes(ratio.clone(), scheme, zeros)
    # The range ends half a step beyond the end codes, where rounding starts to clip.
    center = 0 if zeros is None else zeros
    margin = scheme.end_spacing / 2
    inside = (ratio >= scheme.low - center - margin) & (ratio <= scheme.high - center + margin)
    grad_cells = _cells(gradient.float(), scheme)
    # Equation 3: d rounded / d s is round(v/s) - v/s inside the range and the end code outside.
    grad_ratio = codes.sub_(ratio.mul_(inside)).mul_(grad_cells)
    grad_factor = grad_ratio.sum(-1) * scales.squeeze(-1)
    if minimums is not None:
        # Inside the range, the shift by a minimum cancels; clipped weights move with it.
        extent = cells.amax(-1).clamp_(min=0) - cells.amin(-1).clamp_(max=0)  # (R, G)
        grad_minimum = grad_cells.mul(~inside).sum(-1).neg_().mul_(extent)
        grad_factor = torch.stack([grad_factor, grad_minimum], -1).flatten(1)
    return _from_cells(grad_cells * inside, weight.shape, scheme), grad_factor


@torch.no_grad()
def round_activations(
    x: Tensor,
    rule: Activations,
    reduce_max: Reduce | None = None,
    input_peak: Tensor | None = None,
) -> Tensor:
    """Round an input to the target's values.

    Args:
        x: (..., K); the group divides K.
        rule: the target's activation rounding.
        reduce_max: maximum over the processes, if a token's features are split over several.
        input_peak: () float32, largest input magnitude of the calibration; None if the rule does
            not use one.
    """
    groups = _grouped(x.float(), rule.group_size)
    out = groups.abs()  # the only copy, reused below: each pass costs up to 3% of a matmul
    if rule.dynamic is False:
        assert input_peak is not None
        peak = input_peak
    else:
        peak = out.amax(-1, keepdim=True)  # (..., groups, 1)
        if reduce_max is not None and rule.group_size is None:
            peak = reduce_max(peak)
    divisor = torch.full_like(peak, rule.divisor)
    scale = peak / divisor
    if rule.by_inverse:
        # The target computes both max / 127 and 127 / max, which are not exact inverses.
        torch.mul(groups, _finite(divisor / peak), out=out).round_()
        if rule.scale_of_inverse:
            scale = _finite((divisor / peak).reciprocal())
        scale = _round_to_dtype(scale, getattr(torch, rule.scale_dtype))
    elif rule.element is not None and rule.scale_dtype == "float8_e8m0fnu":
        scale = power_of_two_scale(peak, rule.element)
        round_to_format(torch.div(groups, scale, out=out), rule.element)
    else:
        if rule.dynamic == "local":
            assert input_peak is not None
            scale = _e4m3_scale(scale, calibrated_scale(input_peak, rule))
        else:
            scale = torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)
        torch.div(groups, scale, out=out)
        if rule.element is None:
            out.clamp_(rule.low, rule.high).round_()
        else:
            round_to_format(out, rule.element)
    return _cast(out.mul_(scale).view(x.shape), x.dtype)


def calibrated_scale(input_peak: Tensor, rule: Activations) -> Tensor:
    """Return the scale that is stored for inputs, (1,) float32, from their largest magnitude."""
    if rule.dynamic == "local":
        return _global_scale(input_peak, rule.high)
    scale = (input_peak / torch.full_like(input_peak, rule.divisor)).reshape(1)
    return torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)


def _e4m3_scale(step: Tensor, global_scale: Tensor) -> Tensor:
    """Round scales to multiples of E4M3 values, in units of 1 / global_scale."""
    local = round_to_format(step * global_scale, E4M3)
    return torch.where(local == 0, EPS_E4M3, local) / global_scale


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


def _grouped(x: Tensor, group_size: int | None) -> Tensor:
    """View (..., K) as (..., groups, group)."""
    width = group_size or x.shape[-1]
    return x.reshape(*x.shape[:-1], x.shape[-1] // width, width)


def _cells(weight: Tensor, scheme: Scheme) -> Tensor:
    """View (N, K) as (R, G, cell), the weights that share each scale; blocks are copied."""
    rows, features = weight.shape
    if scheme.strategy == "tensor":
        return weight.reshape(1, 1, -1)
    if scheme.block_structure is None:
        return _grouped(weight, scheme.group_size)
    height, width = scheme.block_structure
    # Zeros at the end of the last blocks do not change their peak.
    padded = F.pad(weight, (0, -features % width, 0, -rows % height))
    blocks = padded.reshape(-1, height, padded.shape[1] // width, width)
    return blocks.transpose(1, 2).flatten(2)


def _from_cells(cells: Tensor, shape: torch.Size, scheme: Scheme) -> Tensor:
    """View (R, G, cell) as (N, K); the inverse of `_cells`."""
    if scheme.block_structure is None:
        return cells.reshape(shape)
    height, width = scheme.block_structure
    blocks = cells.view(*cells.shape[:2], height, width).transpose(1, 2)  # (R, height, G, width)
    full = blocks.reshape(cells.shape[0] * height, -1)
    return full[: shape[0], : shape[1]].contiguous()


def _grid(cells: Tensor, scheme: Scheme, factor: Tensor | None) -> _Grid:
    """Compute the scales, and zero points if any, of a weight's cells (R, G, cell)."""
    if scheme.super_block is not None:
        scales, minimums = super_blocks.plain_scales(cells, scheme, factor)
        stored = super_blocks.store(scales, minimums, scheme.super_block)
        scales, minimums = stored.scales(scheme.super_block), stored.minimums(scheme.super_block)
        return _Grid(
            step=scales.unsqueeze(-1),
            scales=scales.unsqueeze(-1),
            zeros=None,
            global_scale=None,
            minimums=None if minimums is None else minimums.unsqueeze(-1),
            super_scales=stored,
        )
    peak = _peak(cells, scheme)
    is_nested = scheme.strategy == "tensor_group"
    global_scale = _global_scale(peak, scheme.high) if is_nested else None
    step = _plain_step(peak, scheme, factor)
    if scheme.scale_dtype == "float8_e8m0fnu":
        scales = step if factor is None else round_to_power_of_two(step)
    elif global_scale is not None:
        scales = _e4m3_scale(step, global_scale)
    else:
        scales = _round_to_dtype(step, scheme.dtype)
    zeros = None if scheme.symmetric else _zeros(cells, scales, scheme)
    # The target has no unrounded version of a learned scale, so codes use the stored one.
    step = step if scheme.exact_step and factor is None else scales
    return _Grid(step=step, scales=scales, zeros=zeros, global_scale=global_scale)


def _plain_step(peak: Tensor, scheme: Scheme, factor: Tensor | None) -> Tensor:
    """Return scales (R, G, 1) before they are rounded to the scale dtype; overwrites the peak."""
    if scheme.element is not None and scheme.scale_dtype == "float8_e8m0fnu":
        step = power_of_two_scale(peak, scheme.element)
    else:
        # Divide by a tensor: for a number, a GPU multiplies by its inverse, which can differ in a
        # bit.
        step = peak.div_(torch.full_like(peak, scheme.divisor))
    if factor is not None:
        step = step * factor.float().exp().unsqueeze(-1)
    if scheme.eps_for_zeros:
        step = torch.where(step == 0, torch.finfo(step.dtype).eps, step)
    return step


def _global_scale(peak: Tensor, high: int) -> Tensor:
    """Return the factor, (1,), that maps a tensor's largest scale to the end of E4M3's range.

    It is rounded down to a power of two, which the format permits: the values of all codes are then
    exact in bfloat16, so that every runtime computes with the same weights.
    """
    largest = peak.amax().clamp_min(torch.finfo(torch.float32).tiny)
    scale = binade((E4M3.high * high / largest).reshape(1))
    return torch.where(scale.isfinite(), scale, 1.0)


def _zeros(cells: Tensor, scales: Tensor, scheme: Scheme) -> Tensor:
    """Return float32 zero points (R, G, 1); a group's smallest weight gets the lowest code."""
    smallest = cells.amin(-1, keepdim=True).clamp_(max=0)
    return (scheme.low - smallest / scales).clamp_(scheme.low, scheme.high).round_()


def _peak(groups: Tensor, scheme: Scheme) -> Tensor:
    """Return the value of largest magnitude in each cell, (R, G, 1); asymmetric: the range."""
    # For such small groups, two reductions take a ninth of the time of aminmax or of the norm.
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    if not scheme.symmetric:
        return high.clamp_(min=0).sub_(low.clamp_(max=0))  # zero must have a code
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


def _round(
    groups: Tensor,
    step: Tensor,
    scheme: Scheme,
    zeros: Tensor | None,
    minimums: Tensor | None = None,
) -> Tensor:
    """Convert weights to codes less zero points as float32, in place."""
    if minimums is not None:
        groups.add_(minimums)
    return _codes(_divide(groups, step, scheme), scheme, zeros)


def _codes(ratio: Tensor, scheme: Scheme, zeros: Tensor | None) -> Tensor:
    """Convert weights in units of the step to codes less zero points as float32, in place."""
    if scheme.element is not None:
        return round_to_format(ratio, scheme.element)
    if scheme.values is not None:
        values = torch.tensor(scheme.values, dtype=torch.float32, device=ratio.device)
        middles = (values[1:] + values[:-1]) / 2
        return values[torch.bucketize(ratio, middles)]
    if zeros is not None:
        return ratio.add_(zeros).clamp_(scheme.low, scheme.high).round_().sub_(zeros)
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
