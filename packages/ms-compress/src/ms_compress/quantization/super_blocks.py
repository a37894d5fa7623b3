"""Scales of llama.cpp's K-quants: integers in units of float16 scales of a super-block.

A weight is ``code * (d * scale) - dmin * minimum``, with d and dmin float16 per super-block, and an
integer scale and minimum per group. The products are exact in float32 (11 + 7 + 6 bits at most), so
only the subtraction rounds, as in llama.cpp's `dequantize_row_q4_K` and similar functions.

The plain rule takes scale and minimum from a group's range. A learned factor multiplies the scale
and moves the minimum; `fit` searches for the factor with the smallest squared error.
Shapes: R rows, G groups per row, S super-blocks per row, C weights per group.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ms_compress.quantization.scheme import Scheme, SuperBlock

CANDIDATES = 21
"""Number of candidate scales per group, before the super-block's scale is computed."""
REFINEMENTS = 2
"""Number of least-squares fits of a candidate to its own codes."""


class SuperScales(NamedTuple):
    """Stored scales of a weight's groups."""

    scale_codes: Tensor
    """(R, G) int8."""
    minimum_codes: Tensor | None
    """(R, G) int8; None without minimums."""
    super_scales: Tensor
    """(R, S) float16, or (R, 2 S) with each super-block's dmin after its d."""

    def scales(self, rule: SuperBlock) -> Tensor:
        """Return the scale of each group, (R, G) float32."""
        return _units(self.super_scales, rule, 0, self.scale_codes) * self.scale_codes.float()

    def minimums(self, rule: SuperBlock) -> Tensor | None:
        """Return the minimum of each group, (R, G) float32; None without minimums."""
        if self.minimum_codes is None:
            return None
        units = _units(self.super_scales, rule, 1, self.minimum_codes)
        return units * self.minimum_codes.float()


def plain_scales(
    cells: Tensor, scheme: Scheme, factor: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return unrounded scales and minimums (R, G) float32.

    Args:
        cells: weights (R, G, C) float32.
        scheme: scheme with super-blocks.
        factor: (R, G), logarithm of a multiplier on each scale; with minimums (R, 2 G), where each
            group's second value is added to its minimum, in units of the group's range.
    """
    assert scheme.super_block is not None
    low, high = cells.amin(-1), cells.amax(-1)  # (R, G)
    if not scheme.super_block.has_minimums:
        # Signed: the weight of largest magnitude, of either sign, gets the lowest code, as codes
        # reach one further below zero.
        peak = torch.where(high >= -low, high, low)
        # Not by a Python number, which a device may turn into a product with the inverse.
        scales = peak / torch.full_like(peak, scheme.low)
        return (scales if factor is None else scales * factor.float().exp()), None
    # Stored minimums are not negative, so the range always includes zero.
    minimums = low.clamp(max=0).neg_()  # (R, G)
    extent = high.clamp_(min=0).add_(minimums)  # (R, G), the width of the range
    scales = extent / torch.full_like(extent, scheme.high)
    if factor is not None:
        pairs = factor.float().view(*scales.shape, 2)  # (R, G, 2)
        scales = scales * pairs[..., 0].exp()
        minimums = (minimums + pairs[..., 1] * extent).clamp(min=0)
    return scales, minimums


def store(scales: Tensor, minimums: Tensor | None, rule: SuperBlock) -> SuperScales:
    """Round scales and minimums (R, G) float32 to the precision of a super-block."""
    groups = _by_block(scales, rule)  # (R, S, groups per block)
    if rule.low < 0:
        # The scale of largest magnitude gets the lowest integer, one further from zero than the
        # highest.
        smallest, largest = groups.amin(-1), groups.amax(-1)
        units = [torch.where(largest > -smallest, largest, smallest) / rule.low]
    else:
        units = [groups.amax(-1) / rule.high]
    if minimums is not None:
        units.append(_by_block(minimums, rule).amax(-1) / rule.high)
    stored = torch.stack(units, -1).to(torch.float16)  # (R, S, 1 or 2)
    # Inductor removes a cast to lower precision and back, but not an operation on the bits.
    stored = stored.view(torch.int16).bitwise_and(-1).view(torch.float16)
    scale_codes = _integers(scales, stored[..., 0], rule)
    minimum_codes = None if minimums is None else _integers(minimums, stored[..., 1], rule)
    return SuperScales(scale_codes, minimum_codes, stored.flatten(1))


def factor_of(cells: Tensor, scheme: Scheme, scales: Tensor, minimums: Tensor | None) -> Tensor:
    """Return the factor for which the plain rule gives these scales and minimums (R, G)."""
    plain, plain_minimums = plain_scales(cells, scheme, None)
    ratio = scales / plain
    if plain_minimums is None:
        # Flipping the sign of a scale only flips the signs of the codes.
        ratio = ratio.abs()
    # A group of zeros has a plain scale of 0 and needs no factor. A scale that rounded to zero gets
    # a factor that rounds to zero again.
    logarithm = torch.where((plain != 0) & (ratio > 0), ratio, 1.0).log()
    logarithm = torch.where((plain != 0) & (ratio <= 0), -20.0, logarithm)
    if plain_minimums is None or minimums is None:
        return logarithm
    extent = plain * scheme.high  # (R, G), the unit of `moved`
    moved = torch.where(extent > 0, (minimums - plain_minimums) / extent, 0.0)
    return torch.stack([logarithm, moved], -1).flatten(1)


def fit(cells: Tensor, scheme: Scheme, importance: Tensor) -> Tensor:
    """Search for the factor with the smallest Σ importance · (rounded - weight)².

    1. For each group separately, round with several candidate scales, fit scale and minimum to the
       codes of each candidate by least squares, and keep the best, as llama.cpp's quantizers do.
    2. Round the scales for their super-block, then change each group's integers by one where that
       lowers the error of the rounded weights. llama.cpp does not do this.

    Args:
        cells: weights (R, G, C) float32.
        scheme: scheme with super-blocks.
        importance: weight of each squared error, broadcast to the cells.
    """
    rule = scheme.super_block
    assert rule is not None
    importance = importance.expand_as(cells)
    scales, minimums = _best_per_group(cells, scheme, importance)  # (R, G) each
    stored = store(scales, minimums, rule)
    stored = _change_by_one(cells, scheme, importance, stored)
    return factor_of(cells, scheme, stored.scales(rule), stored.minimums(rule))


def round_cells(cells: Tensor, scheme: Scheme, scales: Tensor, minimums: Tensor | None) -> Tensor:
    """Round weights to the nearest codes (R, G, C) float32 for scales (R, G)."""
    shifted = cells if minimums is None else cells + minimums.unsqueeze(-1)
    return (shifted * inverse(scales).unsqueeze(-1)).round_().clamp_(scheme.low, scheme.high)


def inverse(scales: Tensor) -> Tensor:
    """Return 1 / scale, or 0 where the scale is zero."""
    reciprocal = scales.reciprocal()
    return torch.where(reciprocal.isfinite(), reciprocal, 0.0)


def _best_per_group(
    cells: Tensor, scheme: Scheme, importance: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return the best scales and minimums (R, G) of each group, without the super-block's rounding.

    The super-block couples the groups of a row only when the scales are stored.
    """
    has_minimums = scheme.super_block is not None and scheme.super_block.has_minimums
    plain, lowest = plain_scales(cells, scheme, None)
    best, best_minimums = plain, lowest
    lowest_error = _error(cells, scheme, importance, plain, lowest)
    for scales in _candidates(plain, scheme):
        minimums = lowest
        for _ in range(REFINEMENTS):
            codes = round_cells(cells, scheme, scales, minimums)
            scales, minimums = _least_squares(codes, cells, importance, has_minimums)
            error = _error(cells, scheme, importance, scales, minimums)
            # Reject fits that flip the sign of the scale: a factor, exp(x), cannot express them.
            is_better = (error < lowest_error) & (scales * plain > 0)
            lowest_error = torch.where(is_better, error, lowest_error)
            best = torch.where(is_better, scales, best)
            if minimums is not None and best_minimums is not None:
                best_minimums = torch.where(is_better, minimums, best_minimums)
    return best, best_minimums


def _candidates(plain: Tensor, scheme: Scheme) -> Iterator[Tensor]:
    """Yield scales that stretch or shrink the range by at most one quantization step."""
    steps = scheme.high if scheme.low == 0 else -scheme.low
    reach = min(1.0, steps / 4)  # with 2 bits, a full step would change the range too much
    for change in torch.linspace(-reach, reach, CANDIDATES).tolist():
        yield plain * (steps / (steps + change))


def _least_squares(
    codes: Tensor, cells: Tensor, importance: Tensor, has_minimums: bool
) -> tuple[Tensor, Tensor | None]:
    """Fit scale and minimum (R, G) to codes by weighted least squares."""
    # Weighted sums over a group, with weights w, values x and codes l: Σwlx, Σwl², ... (R, G) each.
    weighted = importance * codes
    lx, ll = (weighted * cells).sum(-1), (weighted * codes).sum(-1)
    alone = torch.where(ll > 0, lx / ll, 0.0)  # without a minimum
    if not has_minimums:
        return alone, None
    w_sum, x, length = importance.sum(-1), (importance * cells).sum(-1), weighted.sum(-1)
    # Normal equations of x ≈ scale · l - minimum, by Cramer's rule.
    determinant = w_sum * ll - length * length
    scales = (w_sum * lx - x * length) / determinant
    minimums = (length * lx - ll * x) / determinant
    # Minimums must not be negative, and a group of equal codes has no unique fit.
    has_fit = (determinant > 0) & (minimums > 0) & (scales > 0)
    return torch.where(has_fit, scales, alone), torch.where(has_fit, minimums, 0.0)


def _change_by_one(
    cells: Tensor, scheme: Scheme, importance: Tensor, stored: SuperScales
) -> SuperScales:
    """Change each group's integers by at most one to lower its error.

    Integers at the limit stay, as the super-block's float16 scales are computed from them.
    """
    rule = scheme.super_block
    assert rule is not None
    scale_units = _units(stored.super_scales, rule, 0, stored.scale_codes)
    lowest_error = _error(cells, scheme, importance, stored.scales(rule), stored.minimums(rule))
    best_scales, best_minimums = stored.scale_codes, stored.minimum_codes
    end = rule.low if rule.low < 0 else rule.high
    steps = [-1, 0, 1]
    # All groups at once: nine combinations with minimums, three without.
    for step in steps:
        scale_codes = _stepped(stored.scale_codes, step, end, rule)
        scales = scale_units * scale_codes.float()
        for minimum_step in [0] if stored.minimum_codes is None else steps:
            minimum_codes = stored.minimum_codes
            minimums = None
            if minimum_codes is not None:
                minimum_codes = _stepped(minimum_codes, minimum_step, rule.high, rule)
                units = _units(stored.super_scales, rule, 1, minimum_codes)
                minimums = units * minimum_codes.float()
            error = _error(cells, scheme, importance, scales, minimums)
            is_better = error < lowest_error
            lowest_error = torch.where(is_better, error, lowest_error)
            best_scales = torch.where(is_better, scale_codes, best_scales)
            if minimum_codes is not None and best_minimums is not None:
                best_minimums = torch.where(is_better, minimum_codes, best_minimums)
    return SuperScales(best_scales, best_minimums, stored.super_scales)


def _stepped(codes: Tensor, step: int, end: int, rule: SuperBlock) -> Tensor:
    # int16, as -128 - 1 overflows int8.
    moved = (codes.to(torch.int16) + step).clamp_(rule.low, rule.high).to(torch.int8)
    return torch.where(codes == end, codes, moved)


def _error(
    cells: Tensor, scheme: Scheme, importance: Tensor, scales: Tensor, minimums: Tensor | None
) -> Tensor:
    """Return each group's weighted squared error, (R, G)."""
    rounded = round_cells(cells, scheme, scales, minimums).mul_(scales.unsqueeze(-1))  # (R, G, C)
    if minimums is not None:
        rounded.sub_(minimums.unsqueeze(-1))
    return rounded.sub_(cells).square_().mul_(importance).sum(-1)


def _by_block(values: Tensor, rule: SuperBlock) -> Tensor:
    """View (R, G) as (R, S, groups per super-block)."""
    return values.reshape(len(values), -1, rule.groups)


def _integers(values: Tensor, units: Tensor, rule: SuperBlock) -> Tensor:
    """Round values (R, G) to int8 multiples of their super-block's unit (R, S)."""
    ratio = _by_block(values, rule) * inverse(units.float()).unsqueeze(-1)  # (R, S, G / S)
    return ratio.round_().clamp_(rule.low, rule.high).to(torch.int8).flatten(1)


def _units(super_scales: Tensor, rule: SuperBlock, index: int, codes: Tensor) -> Tensor:
    """Return the float16 scale of each group's super-block, (R, G) float32."""
    units = super_scales.float()[:, index :: rule.scales_per_block].unsqueeze(-1)  # (R, S, 1)
    return units.expand(*units.shape[:-1], rule.groups).reshape(codes.shape)
