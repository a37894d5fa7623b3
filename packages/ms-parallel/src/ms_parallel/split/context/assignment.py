"""Decides which process gets which positions of which row, and counts what attention costs each.

A row is cut into blocks of one size, and every process gets as many blocks of every row, so that
all have as many tokens. A token costs as much as the keys that it sees: those before it in its
document, itself included, within the window. A long document makes late blocks dear, and many short
ones make all blocks alike.
"""

from collections.abc import Iterator, Mapping

import torch
from attrs import evolve, frozen
from torch import Tensor

from ms_parallel.models.spans import SHORTEST_MEAN
from ms_parallel.split.context.kinds import Balance

GOOD_ENOUGH = 1.02
"""Cost of the slowest process over the mean, at which blocks are small enough."""
MOST_QUERIES = 256
"""Most queries of a piece: each is held against all keys that its last one sees."""
MOST_SHORT = 2 * SHORTEST_MEAN
"""Keys of a piece of several short documents."""
MOST_BLOCKS = 64
"""Most blocks of a row on one process: each is a call of attention."""


@frozen(kw_only=True, eq=False)
class Assignment:
    """Which positions each process has."""

    order: Tensor
    """(B, S) int64: places in the row, those of process 0 first, each process's in order."""
    costs: tuple[float, ...]
    """What attention costs each process, in keys seen, over all rows and layers."""

    @property
    def imbalance(self) -> float:
        """Cost of the slowest process over the mean, at least 1."""
        return max(self.costs) * len(self.costs) / sum(self.costs)


def token_costs(starts: Tensor, windows: Mapping[int | None, int]) -> Tensor:
    """Count the keys that each token sees over all layers, (B, S) float64.

    Args:
        starts: (B, S) int64, the place at which each token's document begins.
        windows: how many layers have each window; None for no window.
    """
    seen = torch.arange(starts.shape[1]) - starts + 1
    costs = torch.zeros(starts.shape, dtype=torch.float64)
    for window, layers in windows.items():
        costs += layers * (seen if window is None else seen.clamp(max=window))
    return costs


def document_starts(documents: Tensor | None, rows: int, length: int) -> Tensor:
    """Find the place at which each token's document begins, (B, S) int64, on the CPU.

    A number that comes back later in its row is the same document: it begins where it first stands.
    """
    at = torch.arange(length).expand(rows, length)
    if documents is None:
        return torch.zeros_like(at)
    documents = documents.cpu()
    begins = torch.ones(rows, length, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = torch.where(begins, at, 0).cummax(1).values
    for row in range(rows):
        numbers = documents[row, begins[row]]
        if len(torch.unique(numbers)) < len(numbers):
            _, inverse = torch.unique(documents[row], return_inverse=True)
            first = torch.full((int(inverse.max()) + 1,), length)
            starts[row] = first.scatter_reduce(0, inverse, at[row], "amin")[inverse]
    return starts


def assign(costs: Tensor, count: int, balance: Balance = "balanced") -> Assignment:
    """Share out the positions of rows over `count` processes.

    `balanced` takes the largest blocks that come near the bound, or the smallest that there are.

    Args:
        costs: (B, S) of each token; `count` divides S.
        count: processes.
        balance: how blocks are assigned.
    """
    share = costs.shape[1] // count
    if balance == "zig-zag":
        half = share // 2 if share % 2 == 0 else share
        turns = torch.arange(costs.shape[1] // half)
        owners = torch.minimum(turns, 2 * count - 1 - turns) if half < share else turns
        return _assignment(costs, owners.expand(len(costs), -1), count)
    best = assign(costs, count, "zig-zag")
    for blocks in _block_counts(share):
        if best.imbalance <= GOOD_ENOUGH:
            break
        owners = _least_loaded(costs.view(len(costs), count * blocks, -1).sum(2), count)
        found = _assignment(costs, owners, count)
        best = found if found.imbalance < best.imbalance else best
    return best


def _block_counts(share: int) -> list[int]:
    """List how many blocks of a row a process may have, ascending: powers of two if 3 divide."""
    divisors = [n for n in range(1, min(share, MOST_BLOCKS) + 1) if share % n == 0]
    powers = [n for n in divisors if n & (n - 1) == 0]
    return powers if len(powers) > 2 else divisors


def _least_loaded(costs: Tensor, count: int) -> Tensor:
    """Assign each block to the least loaded process, (B, blocks), by the costs (B, blocks)."""
    owners = torch.empty(costs.shape, dtype=torch.int64)
    loads = [0.0] * count
    for row in costs.sum(1).sort(descending=True, stable=True).indices.tolist():
        left = [costs.shape[1] // count] * count
        order = costs[row].sort(descending=True, stable=True).indices.tolist()
        for block, cost in zip(order, costs[row, order].tolist(), strict=True):
            owner = min((rank for rank in range(count) if left[rank]), key=loads.__getitem__)
            owners[row, block] = owner
            loads[owner] += cost
            left[owner] -= 1
    return owners


def _assignment(costs: Tensor, owners: Tensor, count: int) -> Assignment:
    """Make the assignment of tokens from the owners (B, blocks) of their blocks."""
    of_tokens = owners.repeat_interleave(costs.shape[1] // owners.shape[1], 1)
    loads = torch.zeros(count, dtype=torch.float64)
    loads.scatter_add_(0, of_tokens.flatten(), costs.flatten())
    return Assignment(order=of_tokens.argsort(dim=1, stable=True), costs=tuple(loads.tolist()))


@frozen(kw_only=True)
class QueryRange:
    """Neighbouring positions of a row on one process."""

    row: int
    offset: int
    """Where they stand among those of the process."""
    start: int
    """Their first place in the row."""
    stop: int
    first_key: int
    """The place at which the first of their documents begins."""
    mixed: bool
    """Whether other documents stand among the keys."""

    def first_seen(self, window: int | None) -> int:
        """Return the first place that any of its queries sees."""
        return self.first_key if window is None else max(self.first_key, self.start - window + 1)


def query_ranges(order: Tensor, starts: Tensor) -> list[QueryRange]:
    """List the pieces of a process, row after row: of one document each, or of several short ones.

    Args:
        order: (B, S/N) of the process, each row ascending.
        starts: (B, S), as `document_starts` gives them.
    """
    pieces: list[QueryRange] = []
    for piece in _alone(order, starts):
        before = pieces[-1] if pieces else None
        if before is not None and (before.row, before.stop) == (piece.row, piece.start):
            key = min(before.first_key, piece.first_key)
            if piece.stop - key <= MOST_SHORT:
                pieces[-1] = evolve(before, stop=piece.stop, first_key=key, mixed=True)
                continue
        pieces.append(piece)
    return pieces


def _alone(order: Tensor, starts: Tensor) -> Iterator[QueryRange]:
    """Yield the pieces of one document each."""
    for row, places in enumerate(order):
        own = starts[row, places]
        new = torch.ones(len(places), dtype=torch.bool)
        new[1:] = (places[1:] != places[:-1] + 1) | (own[1:] != own[:-1])
        at = torch.arange(len(places))
        new |= (at - torch.where(new, at, 0).cummax(0).values) % MOST_QUERIES == 0
        offsets = new.nonzero()[:, 0]
        ends = [*offsets[1:].tolist(), len(places)]
        firsts = places[offsets].tolist(), own[offsets].tolist()
        for offset, end, start, key in zip(offsets.tolist(), ends, *firsts, strict=True):
            stop = start + end - offset
            mixed = bool((starts[row, key:stop] != key).any())
            yield QueryRange(
                row=row, offset=offset, start=start, stop=stop, first_key=key, mixed=mixed
            )
