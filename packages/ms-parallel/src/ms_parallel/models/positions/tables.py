"""Cosines and sines of rotary positions, bit for bit those of transformers in float32."""

import math

import torch
from torch import Tensor

from ms_parallel.models.positions.scaling import Rope, RopeScaling

__all__ = ["rotary_tables"]


def rotary_tables(rope: Rope, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles of each position, (B or 1, S, width/2) float32."""
    half = torch.arange(0, rope.width, 2, dtype=torch.float32, device=positions.device)
    frequencies = 1.0 / rope.theta ** (half / rope.width)
    if rope.scaling is not None:
        frequencies = _scale(frequencies, rope.scaling)
    angles = positions[..., None].float() * frequencies
    return angles.cos(), angles.sin()


def _scale(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    original = scaling.original_max_position_embeddings
    turns = original * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)  # 0: stretch fully, 1: leave alone
    return frequencies * (keep + (1 - keep) / scaling.factor)
