"""Operators of layers with a state: the gated delta rule, and a short causal convolution.

Both know the documents of packed rows: no state and no tap crosses from one to the next.
Shapes: B rows, S positions, Hk heads of queries and keys, Hv of values (Hk divides Hv), D widths,
C positions of a chunk.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ms_parallel.operators.cpu import widen

CHUNK = 64
EPS = 1e-6
"""What is added to the squared length of a key or query before its root is taken."""


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    documents: Tensor | None = None,
    silu: bool = False,
) -> Tensor:
    """Convolve each channel with the positions before it.

    Args:
        x: (B, S, channels).
        weight: (channels, K), the last tap for the position itself.
        bias: (channels,).
        documents: (B, S) int32; a tap that lies in another document counts as zero.
        silu: Whether the result goes through SiLU.

    Returns:
        Like `x`.
    """
    if documents is None:
        padded = F.pad(x.transpose(1, 2), (weight.shape[1] - 1, 0))
        out = F.conv1d(padded, weight[:, None], bias, groups=x.shape[2]).transpose(1, 2)
    else:
        out = _taps(x, weight, bias, _runs(documents))
    return F.silu(out) if silu else out


def _taps(x: Tensor, weight: Tensor, bias: Tensor | None, runs: Tensor) -> Tensor:
    """Convolve a tap at a time, inside the documents `runs` (B, S)."""
    taps, length = weight.shape[1], x.shape[1]
    out = x * weight[:, -1] if bias is None else torch.addcmul(bias, x, weight[:, -1])
    for back in range(1, min(taps, length)):
        same = (runs[:, back:] == runs[:, :-back])[..., None]
        earlier = x[:, :-back].masked_fill(~same, 0) * weight[:, -1 - back]
        out = out + F.pad(earlier, (0, 0, back, 0))
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
    """Run linear attention with a decayed, corrected state (Yang et al., 2024, arXiv:2412.06464).

    Each head has a state S, zero where a document begins: S ← e^g · S; S ← S + β · k ⊗ (v - Sᵀk);
    the output is Sᵀq. Computed a chunk at a time by products of matrices. A document's first
    position is cut from the state exactly: what came before it is multiplied by zero, never by the
    exponential of an infinity.

    Args:
        q: (B, S, Hk, Dk).
        k: like `q`; mostly of length 1.
        v: (B, S, Hv, Dv).
        g: (B, S, Hv), the logarithm of what the state keeps, at most 0.
        beta: (B, S, Hv), the rate of correction.
        documents: (B, S) int32.
        scale: of the queries; 1/√Dk by default.
        normalize: Whether q and k are first brought to length 1, x / √(Σx² + 1e-6).

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
    runs = torch.cat((runs, runs[:, -1:].expand(rows, -length % chunk)), 1)
    runs = runs.view(rows, 1, -1, chunk)
    out = _by_chunks(q, k, wide_v * beta, k * beta, g, runs)
    return out.flatten(2, 3)[:, :, :length].transpose(1, 2).to(v.dtype)


def _by_chunks(
    q: Tensor, k: Tensor, v_beta: Tensor, k_beta: Tensor, g: Tensor, runs: Tensor
) -> Tensor:
    """Apply the rule to (B, H, chunks, C, D), inside the documents `runs` (B, 1, chunks, C).

    Inside a chunk the corrections of all positions solve one triangular system; between chunks the
    state (B, H, Dk, Dv) goes on. Decays are summed from the begin of a document, or of the chunk,
    so that no rounding of one document depends on another.
    """
    chunk = q.shape[3]
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    seen = lower & (runs[..., :, None] == runs[..., None, :])
    kept = (seen.to(g.dtype) @ g)[..., 0]
    between = kept[..., :, None] - kept[..., None, :]
    decay = between.masked_fill(~seen, -torch.inf).exp()
    before = F.pad(runs[:, :, :-1, -1:], (0, 0, 1, 0), value=-1)  # the run that the state is of
    carried = (runs == before)[..., None]
    system = (k_beta @ k.mT) * decay
    from_state = (k_beta * kept[..., None].exp()).masked_fill(~carried, 0)
    solved = torch.linalg.solve_triangular(
        system, torch.cat((v_beta, from_state), -1), upper=False, unitriangular=True
    )
    new, of_state = solved.split((v_beta.shape[-1], k.shape[-1]), -1)
    scores = (q @ k.mT) * decay
    asked = (q * kept[..., None].exp()).masked_fill(~carried, 0)
    last = runs[..., -1:]
    left = (k * (kept[..., -1:] - kept)[..., None].exp()).masked_fill(~(runs == last)[..., None], 0)
    stays = (kept[..., -1].exp() * (last == before)[..., 0])[..., None, None]
    state = q.new_zeros(*q.shape[:2], k.shape[-1], v_beta.shape[-1])
    outputs = []
    for at in range(q.shape[2]):
        corrected = new[:, :, at] - of_state[:, :, at] @ state
        outputs.append(asked[:, :, at] @ state + scores[:, :, at] @ corrected)
        state = state * stays[:, :, at] + left[:, :, at].mT @ corrected
    return torch.stack(outputs, 2)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def _chunks(x: Tensor, chunk: int) -> Tensor:
    """Cut (B, S, H, D) into (B, H, chunks, C, D), padded with zeros."""
    x = F.pad(x.transpose(1, 2), (0, 0, 0, -x.shape[1] % chunk))
    return x.reshape(*x.shape[:2], -1, chunk, x.shape[3])


def _runs(documents: Tensor) -> Tensor:
    """Number each position's document in its row, whatever it is called: (B, S) int64."""
    begins = documents[:, 1:] != documents[:, :-1]
    return F.pad(begins.cumsum(1), (1, 0))
