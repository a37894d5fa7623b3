"""Cosines and sines of rotary positions, bit-identical to transformers in float32.

If frequencies depend on the sequence length (dynamic, longrope), each document uses its own length,
so packing does not change the angles.
Shapes: B rows, S positions, F frequencies.
"""

import math

import torch
from torch import Tensor

from ms_parallel.errors import ModelError
from ms_parallel.host_copy import send
from ms_parallel.models.positions.scaling import Rope, RopeScaling


def rotary_tables(
    rope: Rope, positions: Tensor, ends: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute cosines and sines for all positions, (B or 1, S, F) float32.

    Args:
        rope: Rotary settings.
        positions: (B or 1, S) int64.
        ends: (B or 1, S) int64, the length of each position's document; needed if `rope` has a
            `length_limit`.
    """
    inv_freq = frequencies(rope, device=positions.device)
    if rope.length_limit is not None and ends is not None:
        long_inv_freq = _long_frequencies(rope, ends[..., None])  # (F,) or (B or 1, S, F)
        # Beyond the limit, a document uses the long frequencies at all its positions.
        inv_freq = torch.where(ends[..., None] > rope.length_limit, long_inv_freq, inv_freq)
    angles = positions[..., None].float() * inv_freq
    factor = attention_factor(rope)
    return angles.cos() * factor, angles.sin() * factor


def frequencies(rope: Rope, *, device: torch.device | None = None) -> Tensor:
    """Compute inverse frequencies (F,) float32 for texts up to the `length_limit`."""
    powers = _powers(rope, rope.theta, device)
    plain, scaling = 1.0 / powers, rope.scaling
    if scaling is None:
        return plain
    match scaling.kind:
        case "linear":
            return plain / _factor(rope, scaling)
        case "llama3":
            return _llama3(plain, scaling, _factor(rope, scaling))
        case "yarn":
            return _yarn(rope, scaling, powers)
        case "longrope":
            return 1.0 / (send(torch.tensor(scaling.short_factor), powers.device) * powers)
    return plain


def attention_factor(rope: Rope) -> float:
    """Compute the factor on cosines and sines."""
    scaling = rope.scaling
    if scaling is None or scaling.kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    factor, original = _factor(rope, scaling), scaling.original_max_position_embeddings
    if scaling.kind == "longrope":
        longer = factor > 1.0 and original > 1
        return math.sqrt(1 + math.log(factor) / math.log(original)) if longer else 1.0
    if scaling.mscale and scaling.mscale_all_dim:
        return _mscale(factor, scaling.mscale) / _mscale(factor, scaling.mscale_all_dim)
    return _mscale(factor, 1.0)


def document_ends(positions: Tensor, documents: Tensor | None) -> Tensor:
    """Compute the length of each position's document up to now, (B or 1, S) int64.

    Args:
        positions: (B or 1, S) int64 of the new tokens.
        documents: (B, cached and new positions) int32; None for one document per row.
    """
    if documents is None:
        return (positions.amax(-1, keepdim=True) + 1).expand_as(positions)
    new = documents[:, documents.shape[1] - positions.shape[1] :]  # (B, S)
    positions = positions.expand(new.shape)
    starts = torch.ones_like(new, dtype=torch.bool)
    starts[:, 1:] = new[:, 1:] != new[:, :-1]
    segment = starts.cumsum(-1) - 1  # index of the document within the row
    # Maximum position per document, plus 1.
    ends = torch.zeros_like(positions).scatter_reduce(-1, segment, positions + 1, "amax")
    return ends.gather(-1, segment)


def check_growth(rope: Rope, positions: Tensor, ends: Tensor, cached: int) -> None:
    """Check that no cached sequence grows past the length limit, where frequencies change.

    Synchronizes with the device only if the number of positions could have crossed the limit.

    Raises:
        ModelError: a sequence crosses the limit.
    """
    limit = rope.length_limit
    if limit is None or cached == 0 or cached + positions.shape[1] <= limit:
        return
    assert rope.scaling is not None
    # First new position of each row; 0 starts a sequence, which has no cached keys.
    start = positions[..., 0]
    crossing = (start > 0) & (ends[..., 0] > limit)
    if rope.scaling.kind == "longrope":  # one set of frequencies for all lengths past the limit
        crossing &= start <= limit
    if bool(crossing.any()):
        raise ModelError(
            f"rope scaling {rope.scaling.kind!r} changes the rotation of all cached positions when"
            f" a sequence exceeds {limit}; generate at most {limit} positions"
        )


def _powers(rope: Rope, theta: float | Tensor, device: torch.device | None) -> Tensor:
    """Powers theta^(2i/width) for i in [0, F)."""
    even_dims = torch.arange(0, rope.width, 2, dtype=torch.float32, device=device)
    return theta ** (even_dims / rope.width)


def _factor(rope: Rope, scaling: RopeScaling) -> float:
    if scaling.factor is not None:
        return scaling.factor
    return rope.max_position_embeddings / scaling.original_max_position_embeddings


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _long_frequencies(rope: Rope, lengths: Tensor) -> Tensor:
    """Compute inverse frequencies of sequences past the limit: (F,) or (B or 1, S, F)."""
    scaling, limit = rope.scaling, rope.length_limit
    assert scaling is not None
    assert limit is not None
    if scaling.kind == "longrope":
        powers = _powers(rope, rope.theta, lengths.device)
        return 1.0 / (send(torch.tensor(scaling.long_factor), powers.device) * powers)
    # Dynamic NTK: the base grows with the sequence length.
    factor = _factor(rope, scaling)
    # Base scaled as in transformers' `dynamic`; equal to theta at the limit.
    stretch = factor * lengths.clamp(min=limit) / limit - (factor - 1)
    theta = rope.theta * stretch ** (rope.width / (rope.width - 2))
    return 1.0 / _powers(rope, theta, lengths.device)


def _llama3(plain: Tensor, scaling: RopeScaling, factor: float) -> Tensor:
    """Scale long wavelengths, keep short ones, interpolate in between (Llama 3.1 model card)."""
    original = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / plain
    long, short = wavelengths > original / low, wavelengths < original / high
    ramp = (original / wavelengths - low) / (high - low)  # 0: fully scaled, 1: unscaled
    interpolated = (1 - ramp) * plain / factor + ramp * plain
    return torch.where(long, plain / factor, torch.where(short, plain, interpolated))


def _yarn(rope: Rope, scaling: RopeScaling, powers: Tensor) -> Tensor:
    """Scale dims with few rotations in the original context (YaRN, arXiv:2309.00071)."""
    # Position interpolation: all frequencies divided by the factor.
    stretched = 1.0 / (_factor(rope, scaling) * powers)
    original = scaling.original_max_position_embeddings

    def dim(rotations: float) -> float:
        """Dim that makes this number of rotations over the original context."""
        log_ratio = math.log(original / (rotations * 2 * math.pi))
        return rope.width * log_ratio / (2 * math.log(rope.theta))

    low, high = dim(scaling.beta_fast or 32), dim(scaling.beta_slow or 1)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    # Dims below `low` rotate often and stay unscaled; dims above `high` are fully scaled.
    low, high = max(low, 0), min(high, rope.width - 1)
    high = high + 0.001 if low == high else high  # avoid a ramp of width 0
    dims = torch.arange(rope.width // 2, dtype=torch.float32, device=powers.device)
    ramp = 1 - ((dims - low) / (high - low)).clamp(0, 1)  # 0: fully scaled, 1: unscaled
    return stretched * (1 - ramp) + 1.0 / powers * ramp
