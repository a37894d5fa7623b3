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
from ms_kernels.contracts.values import LARGEST, SMALLEST, is_integer, is_number
from ms_kernels.errors import ArgumentError, shown


def _number(
    *, minimum: float, integer: bool = False, optional: bool = False
) -> Callable[[Any, "Attribute[Any]", Any], None]:
    """Return a field validator: a finite number, or an integer, of at least `minimum`."""

    def check(owner: Any, attribute: "Attribute[Any]", value: Any) -> None:
        if optional and value is None:
            return
        expected = "an integer" if integer else "a finite number"
        valid = is_integer(value, int(minimum)) if integer else is_number(value, minimum)
        if not valid:
            fits = f"{expected} of at least {minimum:g}{', or None' if optional else ''}"
            raise ArgumentError(type(owner).__name__, attribute.name, shown(value), fits)

    return check


class RotaryScaling(Protocol):
    """Context extension: a change of the rotary frequencies."""

    def scale(self, frequencies: Tensor, base: float) -> tuple[Tensor, float]:
        """Return the scaled frequencies (R/2,), and a factor applied to cosines and sines."""
        ...


@frozen(kw_only=True)
class LinearScaling:
    """Position interpolation: divide all frequencies by `factor` (arXiv 2306.15595)."""

    factor: float = field(validator=_number(minimum=1))
    """Ratio of the new context length to the training length."""

    def scale(self, frequencies: Tensor, base: float) -> tuple[Tensor, float]:
        """Return ``frequencies / factor``, and 1."""
        return frequencies / self.factor, 1.0


@frozen(kw_only=True)
class Llama3Scaling:
    """Llama 3.1: divide low frequencies by `factor`, keep high ones, and interpolate between them.

    A frequency is low if it makes fewer than `slow_turns` turns within `original_length` positions,
    and high if it makes more than `fast_turns`.
    """

    factor: float = field(default=8.0, validator=_number(minimum=1))
    """Ratio of the new context length to the training length."""
    slow_turns: float = field(default=1.0, validator=_number(minimum=SMALLEST))
    """low_freq_factor in Hugging Face configs."""
    fast_turns: float = field(default=4.0, validator=_number(minimum=SMALLEST))
    """high_freq_factor in Hugging Face configs; above `slow_turns`."""
    original_length: int = field(default=8192, validator=_number(minimum=1, integer=True))
    """Context length in training."""

    def __attrs_post_init__(self) -> None:
        if not self.fast_turns > self.slow_turns:
            fits = f"above slow_turns, {self.slow_turns}"
            raise ArgumentError("Llama3Scaling", "fast_turns", str(self.fast_turns), fits)

    def scale(self, frequencies: Tensor, base: float) -> tuple[Tensor, float]:
        """Return the interpolated frequencies, and 1."""
        # Turns of each pair within the training length.
        turns = self.original_length * frequencies / (2 * math.pi)
        blend = (turns - self.slow_turns) / (self.fast_turns - self.slow_turns)
        blend = blend.clamp(0, 1)
        return blend * frequencies + (1 - blend) * frequencies / self.factor, 1.0


@frozen(kw_only=True)
class YarnScaling:
    """YaRN: interpolation per frequency, and a lower attention temperature (arXiv 2309.00071)."""

    factor: float = field(validator=_number(minimum=1))
    """Ratio of the new context length to the training length."""
    original_length: int = field(validator=_number(minimum=1, integer=True))
    """Context length in training."""
    fast_turns: float = field(default=32.0, validator=_number(minimum=SMALLEST))
    """beta_fast: frequencies with at least this many turns in `original_length` are unchanged."""
    slow_turns: float = field(default=1.0, validator=_number(minimum=SMALLEST))
    """beta_slow: frequencies with at most this many turns are divided by `factor`."""
    attention_factor: float | None = field(
        default=None, validator=_number(minimum=SMALLEST, optional=True)
    )
    """Factor applied to cosines and sines. None: ``0.1 ln(factor) + 1``."""
    whole_pairs: bool = True
    """truncate: round the limits of the interpolation outward to integer indices."""

    def scale(self, frequencies: Tensor, base: float) -> tuple[Tensor, float]:
        """Return the interpolated frequencies, and the attention factor."""
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
        # Solve length * base^(-i / pairs) / 2π = turns for i.
        length = self.original_length / (turns * 2 * math.pi)
        return pairs * math.log(length) / math.log(base)


def rotary_table(
    positions: Tensor,
    *,
    width: int,
    base: float = 10000.0,
    scaling: RotaryScaling | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the cosines and sines for `rotary`.

    Args:
        positions: (C, S) or (S,) of an integer dtype; C is the batch size or 1.
        width: R, the number of rotated features per head; even.
        base: base of the frequencies (rope_theta), above 1.
        scaling: context extension, such as `LinearScaling`, `Llama3Scaling` or `YarnScaling`.

    Returns:
        cos and sin, each (C, S, R/2) float32, on the positions' device; C is 1 for (S,).

    Raises:
        ArgumentError: an argument is invalid.
    """
    if not isinstance(positions, Tensor) or positions.is_floating_point():
        got = describe(positions.dtype) if isinstance(positions, Tensor) else "no tensor"
        raise ArgumentError("rotary_table", "positions", got, "a tensor of integers")
    if positions.ndim not in (1, 2):
        got = f"of shape {describe(positions.shape)}"
        raise ArgumentError("rotary_table", "positions", got, "of shape (C, S) or (S,)")
    if not is_integer(width, 2, 2**31 - 1) or width % 2:
        fits = "an even number, 2 or more"
        raise ArgumentError("rotary_table", "width", shown(width), fits)
    if not is_number(base, 1) or base == 1:
        fits = f"a number above 1, up to {LARGEST:g}"
        raise ArgumentError("rotary_table", "base", shown(base), fits)
    if scaling is not None and not callable(getattr(scaling, "scale", None)):
        fits = "a LinearScaling, Llama3Scaling or YarnScaling"
        raise ArgumentError("rotary_table", "scaling", shown(scaling), fits)
    steps = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device) / width
    frequencies, factor = 1.0 / base**steps, 1.0
    if scaling is not None:
        frequencies, factor = scaling.scale(frequencies, base)
    angles = (
        positions.reshape(*(positions.shape if positions.ndim == 2 else (1, -1)), 1).to(
            torch.float32
        )
        * frequencies
    )
    return angles.cos() * factor, angles.sin() * factor
