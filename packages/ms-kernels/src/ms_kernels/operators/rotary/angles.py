"""Cosines and sines of rotary positions, with optional scaling beyond the training length.

Pair i of R/2 rotates by ``position · base ** (-2i / R)``. A scaling lowers the frequencies of some
pairs. Frequencies and angles are float32, as in the models that were trained with them.
"""

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from attrs import Attribute, field, frozen
from torch import Tensor

from ms_kernels.contracts.call import describe
from ms_kernels.contracts.values import LARGEST, SMALLEST, is_number, is_whole
from ms_kernels.errors import ArgumentError, shown


def _number(
    *, least: float, whole: bool = False, optional: bool = False
) -> Callable[[Any, "Attribute[Any]", Any], None]:
    """Return a field validator: a finite number, or an integer if `whole`, at least `least`."""

    def check(owner: Any, attribute: "Attribute[Any]", value: Any) -> None:
        if optional and value is None:
            return
        kind = "whole" if whole else "finite"
        holds = is_whole(value, int(least)) if whole else is_number(value, least)
        if not holds:
            fits = f"a {kind} number, {least:g} or more{', or None' if optional else ''}"
            raise ArgumentError(type(owner).__name__, attribute.name, shown(value), fits)

    return check


class RotaryScaling(Protocol):
    """How frequencies change for longer texts."""

    def scale(self, frequencies: Tensor, base: float) -> tuple[Tensor, float]:
        """Return the new frequencies (R/2,), and a factor of cosines and sines."""
        ...


@frozen(kw_only=True)
class LinearScaling:
    """Every pair turns `factor` times slower (arXiv 2306.15595)."""

    factor: float = field(validator=_number(least=1))
    """The new length over the one trained on."""

    def scale(self, frequencies: Tensor, base: float) -> tuple[Tensor, float]:
        """Return ``frequencies / factor``, and 1."""
        return frequencies / self.factor, 1.0


@frozen(kw_only=True)
class Llama3Scaling:
    """Slow pairs turn `factor` times slower, fast ones as before, between them a blend (Llama 3.1).

    A pair is slow when it turns fewer than `slow_turns` times within `original_length` positions,
    fast when it turns more than `fast_turns` times.
    """

    factor: float = field(default=8.0, validator=_number(least=1))
    """The new length over the one trained on."""
    slow_turns: float = field(default=1.0, validator=_number(least=SMALLEST))
    """Llama's low_freq_factor."""
    fast_turns: float = field(default=4.0, validator=_number(least=SMALLEST))
    """Llama's high_freq_factor; above `slow_turns`."""
    original_length: int = field(default=8192, validator=_number(least=1, whole=True))
    """Positions trained on."""

    def __attrs_post_init__(self) -> None:
        if not self.fast_turns > self.slow_turns:
            fits = f"above slow_turns, {self.slow_turns}"
            raise ArgumentError("Llama3Scaling", "fast_turns", str(self.fast_turns), fits)

    def scale(self, frequencies: Tensor, base: float) -> tuple[Tensor, float]:
        """Return the blended frequencies, and 1."""
        turns = self.original_length * frequencies / (2 * math.pi)
        blend = (turns - self.slow_turns) / (self.fast_turns - self.slow_turns)
        blend = blend.clamp(0, 1)
        return blend * frequencies + (1 - blend) * frequencies / self.factor, 1.0


@frozen(kw_only=True)
class YarnScaling:
    """YaRN: a blend by pair, and sharper attention (arXiv 2309.00071)."""

    factor: float = field(validator=_number(least=1))
    """The new length over the one trained on."""
    original_length: int = field(validator=_number(least=1, whole=True))
    """Positions trained on."""
    fast_turns: float = field(default=32.0, validator=_number(least=SMALLEST))
    """Pairs that turn at least as often within `original_length` stay as they are; beta_fast."""
    slow_turns: float = field(default=1.0, validator=_number(least=SMALLEST))
    """Pairs that turn at most as often are slowed down by `factor`; beta_slow."""
    attention_factor: float | None = field(
        default=None, validator=_number(least=SMALLEST, optional=True)
    )
    """Factor of cosines and sines; ``0.1 ln(factor) + 1`` if None."""
    whole_pairs: bool = True
    """Whether the limits of the blend are rounded outward to whole pairs; truncate."""

    def scale(self, frequencies: Tensor, base: float) -> tuple[Tensor, float]:
        """Return the blended frequencies, and the factor of attention."""
        pairs = frequencies.shape[0]
        low, high = (
            self._pair_of(turns, pairs, base) for turns in (self.fast_turns, self.slow_turns)
        )
        if self.whole_pairs:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * pairs - 1)
        pair_index = torch.arange(pairs, dtype=torch.float32, device=frequencies.device)
        # Equal limits would divide by 0; a width of 0.001 makes the ramp a step, as in the
        # paper's code.
        slow_weight = ((pair_index - low) / (high - low if high != low else 0.001)).clamp(0, 1)
        factor = self.attention_factor
        if factor is None:
            factor = 0.1 * math.log(self.factor) + 1 if self.factor > 1 else 1.0
        return frequencies / self.factor * slow_weight + frequencies * (1 - slow_weight), factor

    def _pair_of(self, turns: float, pairs: int, base: float) -> float:
        """Return the fractional index of the pair with `turns` turns in the original length."""
        length = self.original_length / (turns * 2 * math.pi)
        return pairs * math.log(length) / math.log(base)


def rotary_table(
    positions: Tensor,
    *,
    width: int,
    base: float = 10000.0,
    scaling: RotaryScaling | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines that `rotary` takes.

    Args:
        positions: (C, S) or (S,) of a whole dtype, C the batch or 1.
        width: R, features of a head that are rotated; even.
        base: of the frequencies; above 1.
        scaling: `LinearScaling`, `Llama3Scaling`, `YarnScaling` or the like.

    Returns:
        cos and sin, each (C, S, R/2) float32, on the positions' device; C is 1 for (S,).

    Raises:
        ArgumentError: when an argument does not fit.
    """
    if not isinstance(positions, Tensor) or positions.is_floating_point():
        got = describe(positions.dtype) if isinstance(positions, Tensor) else "no tensor"
        raise ArgumentError("rotary_table", "positions", got, "a tensor of whole numbers")
    if positions.ndim not in (1, 2):
        got = f"of shape {describe(positions.shape)}"
        raise ArgumentError("rotary_table", "positions", got, "of shape (C, S) or (S,)")
    if not is_whole(width, 2, 2**31 - 1) or width % 2:
        fits = "an even number, 2 or more"
        raise ArgumentError("rotary_table", "width", shown(width), fits)
    if not is_number(base, 1) or base == 1:
        fits = f"a number above 1, up to {LARGEST:g}"
        raise ArgumentError("rotary_table", "base", shown(base), fits)
    steps = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device) / width
    frequencies, factor = 1.0 / base**steps, 1.0
    if scaling is not None:
        frequencies, factor = scaling.scale(frequencies, base)
    angles = positions.reshape(-1, positions.shape[-1], 1).to(torch.float32) * frequencies
    return angles.cos() * factor, angles.sin() * factor
