"""Operators of recurrent layers: the gated delta rule and a short causal convolution.

Both respect document boundaries in packed rows: neither state nor convolution crosses them.
Shapes: B rows, S positions, Hk heads of queries and keys, Hv heads of values (Hk divides Hv),
D head widths, C chunk length.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ms_parallel.operators.cpu import widen

CHUNK = 64
EPS = 1e-6
"""Added to the squared norm of a key or query before the square root."""


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    documents: Tensor | None = None,
    silu: bool = False,
) -> Tensor:
    """Apply a depthwise causal convolution.

    Args:
        x: (B, S, channels).
        weight: (channels, K); the last tap applies to the current position.
        bias: (channels,).
        documents: (B, S) int32; positions of other documents count as zero.
        silu: Apply SiLU to the result.

    Returns:
        Like `x`.
    """
    if documents is None:
        # Left padding by K - 1 makes it causal.
        padded = F.pad(x.transpose(1, 2), (weight.shape[1] - 1, 0))
        out = F.conv1d(padded, weight[:, None], bias, groups=x.shape[2]).transpose(1, 2)
    else:
        out = _taps(x, weight, bias, _runs(documents))
    return F.silu(out) if silu else out


def _taps(x: Tensor, weight: Tensor, bias: Tensor | None, runs: Tensor) -> Tensor:
    """Convolve one tap at a time within the documents `runs` (B, S)."""
    taps, length = weight.shape[1], x.shape[1]
    out = x * weight[:, -1] if bias is None else torch.addcmul(bias, x, weight[:, -1])
    for lag in range(1, min(taps, length)):
        # Documents are contiguous, so equal numbers mean no boundary in between.
        same = (runs[:, lag:] == runs[:, :-lag])[..., None]
        lagged = x[:, :-lag].masked_fill(~same, 0) * weight[:, -1 - lag]
        out = out + F.pad(lagged, (0, 0, lag, 0))
    return out


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    documents: Tensor | None = None,
    scale: float | None = None,
    normalize: bool = False,
) -> Tensor:
    """Compute the gated delta rule, a linear attention (Yang et al., 2024, arXiv:2412.06464).

    Each head has a state S, zero at a document's start: S ← e^g · S; S ← S + β · k ⊗ (v - Sᵀk); the
    output is Sᵀq. Computed chunk by chunk with matrix products. Document boundaries are exact:
    the earlier state is multiplied by zero, never by the exponential of an infinity.

    Args:
        q: (B, S, Hk, Dk).
        k: like `q`; usually of unit length.
        v: (B, S, Hv, Dv).
        g: (B, S, Hv), log decay of the state, at most 0.
        beta: (B, S, Hv), step size of the state update.
        documents: (B, S) int32.
        scale: factor on the queries; 1/√Dk by default.
        normalize: first scale q and k to unit length, x / √(Σx² + 1e-6).

    Returns:
        (B, S, Hv, Dv) in the dtype of `v`, computed in float32 (float64 for float64).
    """
    rows, length, groups = v.shape[0], v.shape[1], v.shape[2] // k.shape[2]
    scale = k.shape[3] ** -0.5 if scale is None else scale
    if normalize:
        q, k = _unit(widen(q)), _unit(widen(k))
    q, k = (x.repeat_interleave(groups, 2) for x in (widen(q) * scale, k))
    if documents is None:
        documents = q.new_zeros(rows, length, dtype=torch.int32)
    chunk = min(CHUNK, max(1, length))
    wide = widen(v).dtype
    q, k, wide_v, g, beta = (
        _chunks(x.to(wide), chunk) for x in (q, k, v, g[..., None], beta[..., None])
    )
    runs = _runs(documents)
    # Padding positions have k = 0 and β = 0, so they leave the state unchanged.
    runs = torch.cat((runs, runs[:, -1:].expand(rows, -length % chunk)), 1)
    runs = runs.view(rows, 1, -1, chunk)
    out = _by_chunks(q, k, wide_v * beta, k * beta, g, runs)
    return out.flatten(2, 3)[:, :, :length].transpose(1, 2).to(v.dtype)


def _by_chunks(
    q: Tensor, k: Tensor, v_beta: Tensor, k_beta: Tensor, g: Tensor, runs: Tensor
) -> Tensor:
    """Apply the rule to (B, H, chunks, C, D) within the documents `runs` (B, 1, chunks, C).

    The state updates of one chunk solve a triangular system; the state (B, H, Dk, Dv) carries over
    between chunks. Log decays accumulate from the start of the document or chunk, so the rounding
    of a document does not depend on its neighbors.
    """
    chunk = q.shape[3]
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    visible = lower & (runs[..., :, None] == runs[..., None, :])
    # Sum of g from the document's or chunk's start to each position; (B, H, chunks, C).
    log_decay = (visible.to(g.dtype) @ g)[..., 0]
    difference = log_decay[..., :, None] - log_decay[..., None, :]
    # Decay from position j to position i of the same document, else 0; (C, C) per chunk.
    decay = difference.masked_fill(~visible, -torch.inf).exp()
    before = F.pad(runs[:, :, :-1, -1:], (0, 0, 1, 0), value=-1)  # document of the incoming state
    carried = (runs == before)[..., None]
    # Position i subtracts β·decay·(k_i·k_j) of each earlier correction: a unit lower triangular
    # system, whose diagonal `unitriangular` takes as 1.
    system = (k_beta @ k.mT) * decay
    # Second right-hand side: the prediction of the incoming state S is linear in S, so the
    # system is solved for its factor, and S is applied in the loop below.
    from_state = (k_beta * log_decay[..., None].exp()).masked_fill(~carried, 0)
    solved = torch.linalg.solve_triangular(
        system, torch.cat((v_beta, from_state), -1), upper=False, unitriangular=True
    )
    new, state_update = solved.split((v_beta.shape[-1], k.shape[-1]), -1)
    scores = (q @ k.mT) * decay
    state_queries = (q * log_decay[..., None].exp()).masked_fill(~carried, 0)
    # Only the chunk's last document reaches the next chunk.
    last = runs[..., -1:]
    state_keys = (k * (log_decay[..., -1:] - log_decay)[..., None].exp()).masked_fill(
        ~(runs == last)[..., None], 0
    )
    state_decay = (log_decay[..., -1].exp() * (last == before)[..., 0])[..., None, None]
    state = q.new_zeros(*q.shape[:2], k.shape[-1], v_beta.shape[-1])
    outputs = []
    # Sequential over chunks; all products above ran over all chunks at once.
    for index in range(q.shape[2]):
        corrected = new[:, :, index] - state_update[:, :, index] @ state
        outputs.append(state_queries[:, :, index] @ state + scores[:, :, index] @ corrected)
        state = state * state_decay[:, :, index] + state_keys[:, :, index].mT @ corrected
    return torch.stack(outputs, 2)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def _chunks(x: Tensor, chunk: int) -> Tensor:
    """Cut (B, S, H, D) into (B, H, chunks, C, D), padded with zeros."""
    x = F.pad(x.transpose(1, 2), (0, 0, 0, -x.shape[1] % chunk))
    return x.reshape(*x.shape[:2], -1, chunk, x.shape[3])


def _runs(documents: Tensor) -> Tensor:
    """Number the documents of each row from 0, in order: (B, S) int64."""
    starts = documents[:, 1:] != documents[:, :-1]
    return F.pad(starts.cumsum(1), (1, 0))
