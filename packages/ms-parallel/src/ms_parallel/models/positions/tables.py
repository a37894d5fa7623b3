"""Cosines and sines of rotary positions, bit for bit those of transformers in float32.

Where a scaling's frequencies depend on how long a text is (dynamic, longrope), each document has
those of its own length, so that packed documents are turned as each alone would be.
Shapes: B rows, S positions, F frequencies.
"""

import math

import torch
from torch import Tensor

from ms_parallel.errors import ModelError
from ms_parallel.models.positions.scaling import Rope, RopeScaling


def rotary_tables(
    rope: Rope, positions: Tensor, ends: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute cosines and sines of the angles of each position, (B or 1, S, F) float32.

    Args:
        rope: What turns.
        positions: (B or 1, S) int64.
        ends: (B or 1, S) int64, the length of each position's document, where `rope` has a
            `length_limit`.
    """
    plain = frequencies(rope, device=positions.device)
    if rope.length_limit is not None and ends is not None:
        changed = _of_long_texts(rope, ends[..., None])
        plain = torch.where(ends[..., None] > rope.length_limit, changed, plain)
    angles = positions[..., None].float() * plain
    factor = attention_factor(rope)
    return angles.cos() * factor, angles.sin() * factor


def frequencies(rope: Rope, *, device: torch.device | None = None) -> Tensor:
    """Compute the angle from one position to the next, (F,) float32, up to the `length_limit`."""
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
            return 1.0 / (torch.tensor(scaling.short_factor, device=device) * powers)
    return plain


def attention_factor(rope: Rope) -> float:
    """Compute what cosines and sines are multiplied by."""
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
    """Compute how long each position's document is, as far as it is here: (B or 1, S) int64.

    Args:
        positions: (B or 1, S) int64 of the new tokens.
        documents: (B, held and new positions) int32; None for one a row.
    """
    if documents is None:
        return (positions.amax(-1, keepdim=True) + 1).expand_as(positions)
    new = documents[:, documents.shape[1] - positions.shape[1] :]
    positions = positions.expand(new.shape)
    begins = torch.ones_like(new, dtype=torch.bool)
    begins[:, 1:] = new[:, 1:] != new[:, :-1]
    number = begins.cumsum(-1) - 1
    ends = torch.zeros_like(positions).scatter_reduce(-1, number, positions + 1, "amax")
    return ends.gather(-1, number)


def check_growth(rope: Rope, positions: Tensor, ends: Tensor, held: int) -> None:
    """Refuse to continue a cached text whose held keys were turned by other frequencies.

    Looks at values only where the number of positions could have crossed the limit.

    Raises:
        ModelError: a text crosses it.
    """
    limit = rope.length_limit
    if limit is None or held == 0 or held + positions.shape[1] <= limit:
        return
    assert rope.scaling is not None
    start = positions[..., 0]
    crossing = (start > 0) & (ends[..., 0] > limit)
    if rope.scaling.kind == "longrope":  # which turns all longer texts alike
        crossing &= start <= limit
    if bool(crossing.any()):
        raise ModelError(
            f"rope scaling {rope.scaling.kind!r} turns all positions anew when a text grows beyond"
            f" {limit}, so that a cache cannot continue it; generate at most {limit} positions"
        )


def _powers(rope: Rope, theta: float | Tensor, device: torch.device | None) -> Tensor:
    half = torch.arange(0, rope.width, 2, dtype=torch.float32, device=device)
    return theta ** (half / rope.width)


def _factor(rope: Rope, scaling: RopeScaling) -> float:
    if scaling.factor is not None:
        return scaling.factor
    return rope.max_position_embeddings / scaling.original_max_position_embeddings


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _of_long_texts(rope: Rope, lengths: Tensor) -> Tensor:
    """Compute frequencies in texts beyond the limit: (F,), or of `lengths` (B or 1, S, 1) each."""
    scaling, limit = rope.scaling, rope.length_limit
    assert scaling is not None
    assert limit is not None
    if scaling.kind == "longrope":
        powers = _powers(rope, rope.theta, lengths.device)
        return 1.0 / (torch.tensor(scaling.long_factor, device=lengths.device) * powers)
    factor = _factor(rope, scaling)
    stretch = factor * lengths.clamp(min=limit) / limit - (factor - 1)
    theta = rope.theta * stretch ** (rope.width / (rope.width - 2))
    return 1.0 / _powers(rope, theta, lengths.device)


def _llama3(plain: Tensor, scaling: RopeScaling, factor: float) -> Tensor:
    """Stretch long waves, leave short ones alone, with a ramp between (Llama 3.1's model card)."""
    original = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    waves = 2 * math.pi / plain
    long, short = waves > original / low, waves < original / high
    keep = (original / waves - low) / (high - low)
    between = (1 - keep) * plain / factor + keep * plain
    return torch.where(long, plain / factor, torch.where(short, plain, between))


def _yarn(rope: Rope, scaling: RopeScaling, powers: Tensor) -> Tensor:
    """Stretch frequencies that turn seldom within the original positions (arXiv:2309.00071)."""
    stretched = 1.0 / (_factor(rope, scaling) * powers)
    original = scaling.original_max_position_embeddings

    def dim(turns: float) -> float:
        inside = math.log(original / (turns * 2 * math.pi))
        return rope.width * inside / (2 * math.log(rope.theta))

    low, high = dim(scaling.beta_fast or 32), dim(scaling.beta_slow or 1)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.width - 1)
    high = high + 0.001 if low == high else high  # else the ramp has no width
    at = torch.arange(rope.width // 2, dtype=torch.float32, device=powers.device)
    keep = 1 - ((at - low) / (high - low)).clamp(0, 1)
    return stretched * (1 - keep) + 1.0 / powers * keep
