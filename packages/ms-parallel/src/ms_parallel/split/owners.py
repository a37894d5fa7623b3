"""Gathers full matrices on owner ranks, and scatters the results back to their shards."""

from collections.abc import Iterator, Mapping
from math import prod

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from ms_parallel.cluster.groups import Groups
from ms_parallel.models.weight_names import Box
from ms_parallel.split.part import part_of

Key = tuple[str, int]
"""Parameter name and index of one of its matrices."""
Ends = tuple[tuple[int, int], ...]
"""A box as hashable (start, stop) pairs."""


@frozen(kw_only=True)
class MatrixPart:
    """A part of a matrix to send, receive or copy locally."""

    key: Key
    peer: int
    """Rank to send it to or receive it from."""
    of_matrix: Box
    """Index of the part in the matrix; meaningful on the matrix's owner."""
    of_part: Box
    """Index of the part in this process's shard; meaningful on the rank that has the shard."""
    shape: tuple[int, ...]


class ExchangePlan:
    """All-to-all plan of one direction of an exchange, the same in every step.

    Args:
        sends: parts that this process provides, in the order of matrices.
        receives: parts that it gets.
        rank: rank of this process in the group.
        group: all processes that exchange.
    """

    def __init__(
        self,
        sends: list[MatrixPart],
        receives: list[MatrixPart],
        rank: int,
        group: dist.ProcessGroup,
    ) -> None:
        self.group = group
        self.local = [part for part in receives if part.peer == rank]
        """Parts that this process has itself and copies without communication."""
        # all_to_all_single expects the rows for rank 0 first.
        self.sends = sorted((p for p in sends if p.peer != rank), key=lambda part: part.peer)
        self.receives = sorted((p for p in receives if p.peer != rank), key=lambda part: part.peer)
        self.sizes = [prod(part.shape) for part in self.receives]
        self.send_counts, self.receive_counts = (
            self._counts(parts) for parts in (self.sends, self.receives)
        )

    def _counts(self, parts: list[MatrixPart]) -> list[int]:
        """Return the number of elements per rank."""
        counts = [0] * dist.get_world_size(self.group)
        for part in parts:
            counts[part.peer] += prod(part.shape)
        return counts

    def run(
        self, values: Mapping[int, Tensor], empty: Tensor
    ) -> Iterator[tuple[MatrixPart, Tensor]]:
        """Exchange all parts; yield each received part with its values.

        Args:
            values: values of each part to send, by its index in `sends`.
            empty: an empty tensor of the dtype and device of all values.
        """
        # A single process has copied all parts locally.
        if len(self.send_counts) == 1:
            return
        send_buffer = torch.cat([empty, *(values[n].reshape(-1) for n in range(len(values)))])
        receive_buffer = empty.new_empty(sum(self.sizes))
        dist.all_to_all_single(
            receive_buffer, send_buffer, self.receive_counts, self.send_counts, group=self.group
        )
        received = torch.split(receive_buffer, self.sizes)
        for part, flat in zip(self.receives, received, strict=True):
            yield part, flat.view(part.shape)


class OwnerExchange:
    """Exchange of matrices with their owners, one process of the stage per matrix; collective.

    Owners are assigned greedily by cost, from the most expensive matrix to the cheapest, to the
    process with the lowest load.

    Args:
        parameters: parameters with parts on this process.
        boxes: box of each matrix in its parameter.
        costs: cost of the work on each matrix.
        groups: process groups of the layout.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        boxes: Mapping[Key, Box],
        costs: Mapping[Key, float],
        groups: Groups,
    ) -> None:
        self.boxes, self.device = dict(boxes), groups.device
        group = groups.group("stage")
        self.rank, count = dist.get_rank(group), dist.get_world_size(group)
        with torch.no_grad():
            self.shards = {name: part_of(parameter).box for name, parameter in parameters.items()}
        self.owner = assign_owners(costs, count)
        self.shapes = {
            key: tuple(s.stop - s.start for s in box)
            for key, box in boxes.items()
            if self.owner[key] == self.rank
        }
        """Shapes of the matrices that this process owns."""
        shard_ends = {name: _ends(box) for name, box in self.shards.items()}
        rank_ends = [shard_ends] * count
        if count > 1:
            dist.all_gather_object(rank_ends, shard_ends, group=group)
        parts = list(self._parts(rank_ends))
        sources = [(key, box, rank) for key, box, is_source, rank in parts if is_source]
        targets = [(key, box, rank) for key, box, _, rank in parts]
        # Gathering needs one copy of each part; scattering reaches every rank that has one.
        self.to_owners = ExchangePlan(
            self._local_parts(sources), self._owned_parts(sources), self.rank, group
        )
        self.from_owners = ExchangePlan(
            self._owned_parts(targets), self._local_parts(targets), self.rank, group
        )

    def _local_parts(self, parts: list[tuple[Key, Box, int]]) -> list[MatrixPart]:
        """Return the parts in this process's shards, with the owner as peer."""
        local = [(key, box) for key, box, rank in parts if rank == self.rank]
        return [self._part(key, self.owner[key], box) for key, box in local]

    def _owned_parts(self, parts: list[tuple[Key, Box, int]]) -> list[MatrixPart]:
        """Return the parts of matrices that this process owns, with the shard's rank as peer."""
        return [self._part(key, rank, box) for key, box, rank in parts if key in self.shapes]

    def _parts(self, rank_ends: list[dict[str, Ends]]) -> Iterator[tuple[Key, Box, bool, int]]:
        """Yield the part of each matrix on each rank, and whether that rank is its source.

        The source of a part that several ranks have is its owner if possible, else the first rank.
        """
        for key, matrix_box in self.boxes.items():
            seen: set[Ends] = set()
            owner = self.owner[key]
            # The owner first: it needs no message for its own part.
            for rank in [owner, *(r for r in range(len(rank_ends)) if r != owner)]:
                shard = tuple(slice(*ends) for ends in rank_ends[rank][key[0]])
                box = intersect(matrix_box, shard)
                if box is not None:
                    yield key, box, _ends(box) not in seen, rank
                    seen.add(_ends(box))

    def _part(self, key: Key, peer: int, box: Box) -> MatrixPart:
        return MatrixPart(
            key=key,
            peer=peer,
            of_matrix=relative_to(box, self.boxes[key]),
            of_part=relative_to(box, self.shards[key[0]]),
            shape=tuple(s.stop - s.start for s in box),
        )

    def gather(self, local: Mapping[str, Tensor]) -> dict[Key, Tensor]:
        """Gather the full matrices that this process owns.

        Args:
            local: this process's shard of each parameter, all of one dtype.
        """
        dtype = next((tensor.dtype for tensor in local.values()), torch.float32)
        empty = torch.empty(0, dtype=dtype, device=self.device)
        matrices = {key: empty.new_empty(shape) for key, shape in self.shapes.items()}
        # Parts on this rank need no message.
        for part in self.to_owners.local:
            matrices[part.key][part.of_matrix] = local[part.key[0]][part.of_part]
        outgoing = {n: local[p.key[0]][p.of_part] for n, p in enumerate(self.to_owners.sends)}
        for part, values in self.to_owners.run(outgoing, empty):
            matrices[part.key][part.of_matrix] = values
        return matrices

    def scatter(
        self, matrices: Mapping[Key, Tensor], dtype: torch.dtype
    ) -> Iterator[tuple[MatrixPart, Tensor]]:
        """Yield each part of this process's shards with the values from its owner.

        Args:
            matrices: full matrices that this process owns.
            dtype: dtype of all matrices.
        """
        # Parts on this rank need no message.
        for part in self.from_owners.local:
            yield part, matrices[part.key][part.of_matrix]
        empty = torch.empty(0, dtype=dtype, device=self.device)
        outgoing = {n: matrices[p.key][p.of_matrix] for n, p in enumerate(self.from_owners.sends)}
        yield from self.from_owners.run(outgoing, empty)


def assign_owners(costs: Mapping[Key, float], count: int) -> dict[Key, int]:
    """Assign each matrix to a rank so that loads are nearly even."""
    load = [0.0] * count
    assignment = {}
    # Most expensive first; names break ties, so that all ranks agree.
    for key in sorted(costs, key=lambda key: (-costs[key], key)):
        assignment[key] = min(range(count), key=lambda rank: load[rank])
        load[assignment[key]] += costs[key]
    return assignment


def intersect(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes; None if empty."""
    starts = [max(s.start, t.start) for s, t in zip(a, b, strict=True)]
    stops = [min(s.stop, t.stop) for s, t in zip(a, b, strict=True)]
    if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
        return None
    return tuple(map(slice, starts, stops))


def relative_to(box: Box, outer: Box) -> Box:
    """Return a box as an index relative to an enclosing box."""
    return tuple(
        slice(a.start - b.start, a.stop - b.start) for a, b in zip(box, outer, strict=True)
    )


def _ends(box: Box) -> Ends:
    return tuple((s.start, s.stop) for s in box)
