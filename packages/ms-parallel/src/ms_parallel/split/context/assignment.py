"""Assigns row positions to context-parallel ranks so that the cost of attention is balanced.

A row is cut into blocks of equal size and every rank gets the same number of blocks of every row,
so all ranks have the same number of tokens. The cost of a token is the number of keys it attends
to: earlier tokens of its document and itself, within the window. A long document makes late blocks
expensive; many short documents make all blocks equal.

Shapes: B rows, S positions, N context ranks.
"""

from collections.abc import Iterator, Mapping

import torch
from attrs import evolve, frozen
from torch import Tensor

from ms_parallel.models.spans import MIN_MEAN_LENGTH
from ms_parallel.split.context.kinds import ContextBalance

MAX_IMBALANCE = 1.02
"""Accepted ratio of the slowest rank's cost to the mean."""
MAX_QUERIES = 256
"""Maximum queries per range: each computes scores for every key that the last query sees."""
MAX_MERGED_KEYS = 2 * MIN_MEAN_LENGTH
"""Maximum keys of a range that merges several short documents."""
MAX_BLOCKS = 64
"""Maximum blocks per row and rank: each is a separate attention call."""


@frozen(kw_only=True, eq=False)
class Assignment:
    """Assignment of positions to ranks."""

    order: Tensor
    """(B, S) int64: row positions sorted by rank; ascending within a rank."""
    costs: tuple[float, ...]
    """Attention cost of each rank: keys seen by its queries, over all rows and layers."""

    @property
    def imbalance(self) -> float:
        """Cost of the slowest rank over the mean, at least 1."""
        return max(self.costs) * len(self.costs) / sum(self.costs)


def token_costs(starts: Tensor, windows: Mapping[int | None, int]) -> Tensor:
    """Return the number of keys that each token attends to over all layers, (B, S) float64.

    Args:
        starts: (B, S) int64, start of each token's document.
        windows: number of layers by attention window; None is full attention.
    """
    keys = torch.arange(starts.shape[1]) - starts + 1  # (B, S)
    costs = torch.zeros(starts.shape, dtype=torch.float64)
    for window, layers in windows.items():
        costs += layers * (keys if window is None else keys.clamp(max=window))
    return costs


def document_starts(documents: Tensor | None, rows: int, length: int) -> Tensor:
    """Return the start position of each token's document, (B, S) int64, on the CPU.

    A document number that reappears later in its row is the same document, which starts at its
    first position.
    """
    positions = torch.arange(length).expand(rows, length)
    if documents is None:
        return torch.zeros_like(positions)
    documents = documents.cpu()
    is_start = torch.ones(rows, length, dtype=torch.bool)
    is_start[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = torch.where(is_start, positions, 0).cummax(1).values
    for row in range(rows):
        numbers = documents[row, is_start[row]]
        if len(torch.unique(numbers)) < len(numbers):  # some document is not contiguous
            _, inverse = torch.unique(documents[row], return_inverse=True)
            first = torch.full((int(inverse.max()) + 1,), length)
            starts[row] = first.scatter_reduce(0, inverse, positions[row], "amin")[inverse]
    return starts


def assign(costs: Tensor, count: int, balance: ContextBalance = "balanced") -> Assignment:
    """Assign the positions of all rows to `count` ranks.

    `balanced` uses the fewest, largest blocks that reach `MAX_IMBALANCE`; if none do, the best
    assignment that it tried.

    Args:
        costs: (B, S) cost of each token; `count` divides S.
        count: number of ranks.
        balance: how blocks are assigned.
    """
    tokens_per_rank = costs.shape[1] // count
    if balance == "zig-zag":
        # Blocks 0..2N-1 go to ranks 0..N-1 and back, N-1..0. An odd share cannot be halved, so
        # each rank gets one block.
        block = tokens_per_rank // 2 if tokens_per_rank % 2 == 0 else tokens_per_rank
        index = torch.arange(costs.shape[1] // block)
        owners = torch.minimum(index, 2 * count - 1 - index) if block < tokens_per_rank else index
        return _assignment(costs, owners.expand(len(costs), -1), count)
    best = assign(costs, count, "zig-zag")
    for blocks in _block_counts(tokens_per_rank):
        if best.imbalance <= MAX_IMBALANCE:
            break
        owners = _least_loaded(costs.view(len(costs), count * blocks, -1).sum(2), count)
        candidate = _assignment(costs, owners, count)
        best = candidate if candidate.imbalance < best.imbalance else best
    return best


def _block_counts(tokens_per_rank: int) -> list[int]:
    """Return possible blocks per row and rank, ascending: powers of two if at least 3 divide."""
    limit = min(tokens_per_rank, MAX_BLOCKS)
    divisors = [n for n in range(1, limit + 1) if tokens_per_rank % n == 0]
    powers = [n for n in divisors if n & (n - 1) == 0]
    return powers if len(powers) > 2 else divisors


def _least_loaded(costs: Tensor, count: int) -> Tensor:
    """Assign each block, most expensive first, to the least loaded rank with room in that row.

    Args:
        costs: (B, blocks).
        count: number of ranks.

    Returns:
        Owner ranks, (B, blocks) int64.
    """
    owners = torch.empty(costs.shape, dtype=torch.int64)
    loads = [0.0] * count  # carried from row to row, so that rows even each other out
    # Rows with the highest cost first.
    for row in costs.sum(1).sort(descending=True, stable=True).indices.tolist():
        free_blocks = [costs.shape[1] // count] * count
        order = costs[row].sort(descending=True, stable=True).indices.tolist()
        for block, cost in zip(order, costs[row, order].tolist(), strict=True):
            owner = min((rank for rank in range(count) if free_blocks[rank]), key=loads.__getitem__)
            owners[row, block] = owner
            loads[owner] += cost
            free_blocks[owner] -= 1
    return owners


def _assignment(costs: Tensor, owners: Tensor, count: int) -> Assignment:
    """Build the token assignment from the owners (B, blocks) of blocks."""
    token_owners = owners.repeat_interleave(costs.shape[1] // owners.shape[1], 1)  # (B, S)
    loads = torch.zeros(count, dtype=torch.float64)
    loads.scatter_add_(0, token_owners.flatten(), costs.flatten())
    return Assignment(order=token_owners.argsort(dim=1, stable=True), costs=tuple(loads.tolist()))


@frozen(kw_only=True)
class QueryRange:
    """Contiguous query positions [start, stop) of a row on one rank."""

    row: int
    offset: int
    """Offset among the positions of the rank."""
    start: int
    """First position in the row."""
    stop: int
    first_key: int
    """Start of the first document in the range."""
    mixed: bool
    """Keys from `first_key` to `stop` include other documents, so a mask is needed."""

    def first_seen(self, window: int | None) -> int:
        """Return the first key that any query of the range attends to."""
        return self.first_key if window is None else max(self.first_key, self.start - window + 1)


def query_ranges(order: Tensor, starts: Tensor) -> list[QueryRange]:
    """Cut a rank's positions into ranges of one document each, or of several short documents.

    Args:
        order: (B, S/N) row positions of the rank, each row ascending.
        starts: (B, S), from `document_starts`.
    """
    ranges: list[QueryRange] = []
    for current in _single_document_ranges(order, starts):
        previous = ranges[-1] if ranges else None
        if previous is not None and (previous.row, previous.stop) == (current.row, current.start):
            first_key = min(previous.first_key, current.first_key)
            if current.stop - first_key <= MAX_MERGED_KEYS:
                ranges[-1] = evolve(previous, stop=current.stop, first_key=first_key, mixed=True)
                continue
        ranges.append(current)
    return ranges


def _single_document_ranges(order: Tensor, starts: Tensor) -> Iterator[QueryRange]:
    """Yield ranges of one document each, at most `MAX_QUERIES` long."""
    for row, positions in enumerate(order):
        first_keys = starts[row, positions]  # (S/N,)
        is_start = torch.ones(len(positions), dtype=torch.bool)
        # A range starts where positions are not consecutive or the document changes,
        is_start[1:] = (positions[1:] != positions[:-1] + 1) | (first_keys[1:] != first_keys[:-1])
        index = torch.arange(len(positions))
        # and every MAX_QUERIES positions after that.
        is_start |= (index - torch.where(is_start, index, 0).cummax(0).values) % MAX_QUERIES == 0
        offsets = is_start.nonzero()[:, 0]
        ends = [*offsets[1:].tolist(), len(positions)]
        firsts = positions[offsets].tolist(), first_keys[offsets].tolist()
        for offset, end, start, key in zip(offsets.tolist(), ends, *firsts, strict=True):
            stop = start + end - offset
            mixed = bool((starts[row, key:stop] != key).any())
            yield QueryRange(
                row=row, offset=offset, start=start, stop=stop, first_key=key, mixed=mixed
            )
