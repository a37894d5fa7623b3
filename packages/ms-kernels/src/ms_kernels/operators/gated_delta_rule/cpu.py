"""The gated delta rule in chunks: products of matrices in place of a step for each position.

Within a chunk the changes of all positions solve one triangular system, since each depends on
those before it alone; from chunk to chunk goes the state (Yang et al., 2024, section 3).

1. A chunk never crosses into another document, so nothing is masked and nothing can leak: the
   documents of all rows are cut apart, and their first chunks are made together, then the second.
2. Decays between two positions are sums of those between them, never differences of sums, which
   would lose what a strong decay before them has swallowed, and be NaN at a decay to nothing.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ms_kernels.backends.cpu import on_cpu
from ms_kernels.contracts.call import Call, accumulator
from ms_kernels.contracts.documents import starts_of
from ms_kernels.operators.gated_delta_rule.contract import CONTRACT, RuleOptions, normalized

LONGEST = 64
"""Positions of a chunk: its triangular system grows with their square."""

FEWEST = 8
"""Positions from which on chunks are faster than steps."""


class Chunks(NamedTuple):
    """How rows are cut: runs are documents, those of the most chunks first."""

    places: Tensor
    """(N, C) int64: positions of each chunk among all B · S, B · S where there is none; all runs'
    first chunks, then their second ones."""
    counts: list[int]
    """How many runs have a first chunk, a second one and so on."""
    firsts: Tensor
    """(B,) int64: the run that each row begins with."""
    lasts: Tensor
    """(B,) int64: the run that each row ends with."""


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
    """Return what each position's query reads, and perhaps the state after the last one."""
    settings = RuleOptions(*options)
    batch, positions, groups, width = q.shape
    heads, out_width = v.shape[2:]
    wide = accumulator(q.dtype)
    cut = _cut(batch, positions, documents)
    split = (groups, heads // groups)
    queries, keys = (
        _chunked(normalized(each.to(wide), settings.normalize), cut).unsqueeze(2) for each in (q, k)
    )  # (N, Hk, 1, C, D)
    values = torch.unflatten(_chunked(v.to(wide), cut), 1, split)  # (N, Hk, Hv / Hk, C, Dv)
    decays, shares = (torch.unflatten(_chunked(each.to(wide), cut), 1, split) for each in (g, beta))
    held = queries.new_zeros((cut.counts[0], *split, width, out_width))
    if state is not None:
        held = held.index_copy(0, cut.firsts, torch.unflatten(state.to(wide), 1, split))
    read, final = _walk(queries, keys, values, decays, shares, held, cut.counts)
    rows = read.flatten(1, 2).transpose(1, 2).reshape(-1, heads * out_width)  # (N · C, Hv · Dv)
    back = torch.empty(batch * positions + 1, dtype=torch.int64)
    back[cut.places.flatten()] = torch.arange(cut.places.numel())
    result = rows.index_select(0, back[:-1]).view(v.shape) * settings.factor(width)
    result = result.to(q.dtype)
    return (result, final.index_select(0, cut.lasts).flatten(1, 2)) if options[-1] else result


def _cut(batch: int, positions: int, documents: Tensor | None) -> Chunks:
    """Cut each row's documents into chunks of one length."""
    total = batch * positions
    begins = list(range(0, total, positions))
    if documents is not None:
        starts = starts_of(documents)
        starts[:, 0] = True
        begins = starts.flatten().nonzero().flatten().tolist()
    ends = [*begins[1:], total][: len(begins)]
    lengths = [end - begin for begin, end in zip(begins, ends, strict=True)]
    longest = max(lengths, default=1)
    size = min(LONGEST, 1 << (longest - 1).bit_length())
    order = sorted(range(len(begins)), key=lambda run: -lengths[run])
    first: list[int] = []
    until: list[int] = []
    counts, going = [], order
    for step in range(0, longest, size):
        going = [run for run in going if lengths[run] > step]
        first += [begins[run] + step for run in going]
        until += [ends[run] for run in going]
        counts.append(len(going))
    places = _column(first) + torch.arange(size)
    places = places.masked_fill(places >= _column(until), total)
    rank = [0] * len(order)
    for place, run in enumerate(order):
        rank[run] = place
    firsts = [rank[run] for run, begin in enumerate(begins) if begin % positions == 0]
    lasts = [rank[run] for run, end in enumerate(ends) if end % positions == 0]
    return Chunks(places, counts, _column(firsts).flatten(), _column(lasts).flatten())


def _column(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64).unsqueeze(-1)


def _chunked(x: Tensor, cut: Chunks) -> Tensor:
    """Return x (B, S, H, ...) as (N, H, C, ...), 0 where a chunk has no position."""
    flat = x.flatten(0, 1)
    padded = torch.cat((flat, flat.new_zeros((1, *flat.shape[1:]))))
    chosen = padded.index_select(0, cut.places.flatten())
    return chosen.view(*cut.places.shape, *x.shape[2:]).movedim(2, 1)


def _walk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, held: Tensor, counts: list[int]
) -> tuple[Tensor, Tensor]:
    """Return what is read (N, Hk, Hv / Hk, C, Dv) and each run's last state.

    ``changes = fresh - keyed · S`` for the state S that a chunk begins with: both at once, from a
    triangular system ``(1 + β · tril(k kᵀ · decays)) [fresh keyed] = β · [v decayed·k]``.
    """
    between, so_far, still = _decays(g)
    mixing = torch.tril(k @ k.transpose(-1, -2), -1) * between * beta.unsqueeze(-1)
    known = torch.cat((v, k * so_far.unsqueeze(-1)), -1) * beta.unsqueeze(-1)
    solved = torch.linalg.solve_triangular(mixing, known, upper=False, unitriangular=True)
    fresh, keyed = solved.split([v.shape[-1], k.shape[-1]], -1)
    asked = q * so_far.unsqueeze(-1)
    among = (q @ k.transpose(-1, -2)) * between
    kept = (k * still.unsqueeze(-1)).transpose(-1, -2)
    fade = so_far[..., -1:, None]
    read, ended, first = [], [], 0
    for count in counts:
        part = slice(first, first + count)
        ended.append(held[count:])
        held, first = held[:count], first + count
        change = fresh[part] - keyed[part] @ held
        read.append(asked[part] @ held + among[part] @ change)
        held = held * fade[part] + kept[part] @ change
    return torch.cat(read), torch.cat((held, *reversed(ended)))


def _decays(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return decays between positions of chunks, from their begin, and to their end.

    Args:
        g: (..., C).

    Returns:
        ``e^Σ g`` over the positions after column j up to row i (..., C, C), 0 for j > i; over those
        up to i (..., C); over those after j (..., C).
    """
    size = g.shape[-1]
    later = torch.ones((size, size), dtype=torch.bool, device=g.device).tril(-1)
    sums = g.unsqueeze(-1).expand(*g.shape, size).masked_fill(~later, 0).cumsum(-2)
    between = sums.exp().tril()
    return between, g.cumsum(-1).exp(), between[..., -1, :]


def _refuses(call: Call) -> str | None:
    """Decline few positions, and documents that are not there to be read."""
    positions = call.present[0].shape[1]
    if positions < FEWEST:
        return f"pays from {FEWEST} positions on, and here are {positions}"
    if call.compiling and call.tensors[5] is not None:
        return "torch.compile cannot read the documents"
    return None


IMPLEMENTATION = on_cpu(
    CONTRACT,
    gated_delta_rule,
    "chunks of up to 64 positions, each document by itself",
    refuses=_refuses,
    pays_from=0,
)
