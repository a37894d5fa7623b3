"""Gated delta rule in chunks: matrix products instead of one step per position.

Within a chunk the state updates of all positions solve one triangular system, since each depends
only on earlier ones; the state is passed from chunk to chunk (Yang et al., 2024, section 3).

1. A chunk never crosses a document boundary, so no masking is needed and documents cannot leak into
   one another. The documents of all rows are split up; the first chunks of all documents are
   computed together, then the second chunks, and so on.
2. Log decays between two positions are summed over the positions between them, never computed as
   differences of cumulative sums: those lose precision after a strong decay and are NaN for
   a decay to 0.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ms_kernels.backends.cpu import on_cpu
from ms_kernels.contracts.call import Call, accumulator
from ms_kernels.contracts.documents import starts_of
from ms_kernels.operators.gated_delta_rule.contract import CONTRACT, RuleOptions, l2_normalize

MAX_CHUNK = 64
"""Maximum positions per chunk: the triangular system grows quadratically."""

MIN_POSITIONS = 8
"""Minimum number of positions at which chunks are faster than steps."""


class Chunks(NamedTuple):
    """Partition of the rows into chunks; runs are documents, sorted by descending length."""

    places: Tensor
    """(N, C) int64: flat position in B · S of each chunk element, B · S for padding; the first
    chunks of all runs, then the second chunks, and so on."""
    counts: list[int]
    """Number of runs with at least one chunk, at least two chunks, and so on."""
    firsts: Tensor
    """(B,) int64: first run of each row."""
    lasts: Tensor
    """(B,) int64: last run of each row."""


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    documents: Tensor | None,
    state: Tensor | None,
    *options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the output of each position; with `final_state` also the state after the last one."""
    settings = RuleOptions(*options)
    batch, positions, groups, width = q.shape
    heads, out_width = v.shape[2:]
    wide = accumulator(q.dtype)
    cut = _cut(batch, positions, documents)
    split = (groups, heads // groups)
    queries, keys = (
        _chunked(l2_normalize(vectors.to(wide), settings.normalize), cut).unsqueeze(2)
        for vectors in (q, k)
    )  # (N, Hk, 1, C, D)
    values = torch.unflatten(_chunked(v.to(wide), cut), 1, split)  # (N, Hk, Hv / Hk, C, Dv)
    decays, betas = (torch.unflatten(_chunked(gate.to(wide), cut), 1, split) for gate in (g, beta))
    initial_states = queries.new_zeros((cut.counts[0], *split, width, out_width))
    if state is not None:
        initial_states = initial_states.index_copy(
            0, cut.firsts, torch.unflatten(state.to(wide), 1, split)
        )
    outputs, final = _scan_chunks(queries, keys, values, decays, betas, initial_states, cut.counts)
    rows = outputs.flatten(1, 2).transpose(1, 2).reshape(-1, heads * out_width)  # (N · C, Hv · Dv)
    row_of_position = torch.empty(batch * positions + 1, dtype=torch.int64)
    row_of_position[cut.places.flatten()] = torch.arange(cut.places.numel())
    result = rows.index_select(0, row_of_position[:-1]).view(v.shape) * settings.factor(width)
    result = result.to(q.dtype)
    return (result, final.index_select(0, cut.lasts).flatten(1, 2)) if options[-1] else result


def _cut(batch: int, positions: int, documents: Tensor | None) -> Chunks:
    """Split the documents of all rows into chunks of equal length."""
    total = batch * positions
    begins = list(range(0, total, positions))
    if documents is not None:
        starts = starts_of(documents)
        starts[:, 0] = True
        begins = starts.flatten().nonzero().flatten().tolist()
    ends = [*begins[1:], total][: len(begins)]
    lengths = [end - begin for begin, end in zip(begins, ends, strict=True)]
    longest = max(lengths, default=1)
    size = min(MAX_CHUNK, 1 << (longest - 1).bit_length())
    # Longest first: the runs that are active at a step are a prefix of `order`.
    order = sorted(range(len(begins)), key=lambda run: -lengths[run])
    chunk_starts: list[int] = []
    chunk_ends: list[int] = []
    counts, active = [], order
    for step in range(0, longest, size):
        active = [run for run in active if lengths[run] > step]
        chunk_starts += [begins[run] + step for run in active]
        chunk_ends += [ends[run] for run in active]
        counts.append(len(active))
    positions_of_chunks = _column(chunk_starts) + torch.arange(size)
    positions_of_chunks = positions_of_chunks.masked_fill(
        positions_of_chunks >= _column(chunk_ends), total
    )
    rank = [0] * len(order)
    for index, run in enumerate(order):
        rank[run] = index
    firsts = [rank[run] for run, begin in enumerate(begins) if begin % positions == 0]
    lasts = [rank[run] for run, end in enumerate(ends) if end % positions == 0]
    return Chunks(positions_of_chunks, counts, _column(firsts).flatten(), _column(lasts).flatten())


def _column(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64).unsqueeze(-1)


def _chunked(x: Tensor, cut: Chunks) -> Tensor:
    """Gather x (B, S, H, ...) into chunks (N, H, C, ...), padded with 0."""
    flat = x.flatten(0, 1)
    padded = torch.cat((flat, flat.new_zeros((1, *flat.shape[1:]))))
    gathered = padded.index_select(0, cut.places.flatten())
    return gathered.view(*cut.places.shape, *x.shape[2:]).movedim(2, 1)


def _scan_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, counts: list[int]
) -> tuple[Tensor, Tensor]:
    """Return the outputs (N, Hk, Hv / Hk, C, Dv) and the last state of each run.

    For a chunk's initial state S, ``updates = fresh - keyed · S``; both terms solve the triangular
    system ``(1 + β · tril(k kᵀ · decays)) [fresh keyed] = β · [v decayed·k]``.
    """
    pair_decay, decay_from_start, decay_to_end = _decays(g)
    # (N, Hk, Hv / Hk, C, C), strictly lower triangular
    mixing = torch.tril(k @ k.transpose(-1, -2), -1) * pair_decay * beta.unsqueeze(-1)
    right_side = torch.cat((v, k * decay_from_start.unsqueeze(-1)), -1) * beta.unsqueeze(-1)
    # One triangular solve replaces the C sequential rank-1 updates of a chunk (WY form).
    solved = torch.linalg.solve_triangular(mixing, right_side, upper=False, unitriangular=True)
    fresh, keyed = solved.split([v.shape[-1], k.shape[-1]], -1)
    decayed_q = q * decay_from_start.unsqueeze(-1)  # e^Σg from the chunk start
    intra_scores = (q @ k.transpose(-1, -2)) * pair_decay  # attention within the chunk
    decayed_k = (k * decay_to_end.unsqueeze(-1)).transpose(-1, -2)
    chunk_decay = decay_from_start[..., -1:, None]
    outputs, final_states, first = [], [], 0
    # Chunks of a run depend on each other only through the state, so step i of all runs is a batch.
    for count in counts:
        part = slice(first, first + count)
        final_states.append(state[count:])
        state, first = state[:count], first + count
        updates = fresh[part] - keyed[part] @ state
        outputs.append(decayed_q[part] @ state + intra_scores[part] @ updates)
        state = state * chunk_decay[part] + decayed_k[part] @ updates
    return torch.cat(outputs), torch.cat((state, *reversed(final_states)))


def _decays(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return decays between positions of a chunk, from its start, and to its end.

    Args:
        g: log decays (..., C).

    Returns:
        ``e^Σ g`` over positions j + 1 to i, (..., C, C) with row i and column j, 0 for j > i; over
        positions up to i, (..., C); over positions after j, (..., C).
    """
    size = g.shape[-1]
    lower = torch.ones((size, size), dtype=torch.bool, device=g.device).tril(-1)
    # Sum masked logs: a difference of two cumulative sums would cancel for strong decays.
    sums = g.unsqueeze(-1).expand(*g.shape, size).masked_fill(~lower, 0).cumsum(-2)
    between = sums.exp().tril()
    return between, g.cumsum(-1).exp(), between[..., -1, :]


def _refuses(call: Call) -> str | None:
    """Decline short sequences, and documents under torch.compile, which cannot read them."""
    positions = call.present[0].shape[1]
    if positions < MIN_POSITIONS:
        return f"is faster from {MIN_POSITIONS} positions, and this call has {positions}"
    if call.compiling and call.tensors[5] is not None:
        return "torch.compile cannot read the documents"
    return None


IMPLEMENTATION = on_cpu(
    CONTRACT,
    gated_delta_rule,
    "chunks of up to 64 positions, documents processed separately",
    refuses=_refuses,
    pays_from=0,
)
