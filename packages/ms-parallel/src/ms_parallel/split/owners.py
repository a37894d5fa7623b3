"""Gathers full matrices on owner processes, and scatters the results back to all parts."""

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
    of_part: Box
    """The same numbers in the matrix, and in this process's part of the parameter: of the two, only
    that which the process has is meant."""
    shape: tuple[int, ...]


class Trip:
    """What one way of an exchange takes from and to this process, the same in every update.

    Args:
        away: what this process gives, in the order of matrices.
        here: what it gets.
        rank: its own, in the group.
        group: of all that exchange.
    """

    def __init__(
        self, away: list[MatrixPart], here: list[MatrixPart], rank: int, group: dist.ProcessGroup
    ) -> None:
        self.group = group
        self.kept = [piece for piece in here if piece.peer == rank]
        self.away = sorted((p for p in away if p.peer != rank), key=lambda piece: piece.peer)
        self.here = sorted((p for p in here if p.peer != rank), key=lambda piece: piece.peer)
        self.sizes = [prod(piece.shape) for piece in self.here]
        self.sent, self.got = (self._totals(pieces) for pieces in (self.away, self.here))

    def _totals(self, pieces: list[MatrixPart]) -> list[int]:
        totals = [0] * dist.get_world_size(self.group)
        for piece in pieces:
            totals[piece.peer] += prod(piece.shape)
        return totals

    def send(
        self, values: Mapping[int, Tensor], like: Tensor
    ) -> Iterator[tuple[MatrixPart, Tensor]]:
        """Give each piece that comes, with its values.

        Args:
            values: of each piece that goes, by its number in `away`.
            like: an empty tensor of their dtype and device.
        """
        if len(self.sent) == 1:
            return
        flat = torch.cat([like, *(values[number].reshape(-1) for number in range(len(values)))])
        come = like.new_empty(sum(self.sizes))
        dist.all_to_all_single(come, flat, self.got, self.sent, group=self.group)
        arrived = torch.split(come, self.sizes)
        for piece, part in zip(self.here, arrived, strict=True):
            yield piece, part.view(piece.shape)


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
            self.mine = {name: part_of(parameter).box for name, parameter in parameters.items()}
        self.owner = owners(costs, count)
        self.shapes = {
            key: tuple(s.stop - s.start for s in box)
            for key, box in boxes.items()
            if self.owner[key] == self.rank
        }
        plain = {name: _ends(box) for name, box in self.mine.items()}
        parts = [plain] * count
        if count > 1:
            dist.all_gather_object(parts, plain, group=group)
        every = list(self._pieces(parts))
        given = [(key, box, at) for key, box, gives, at in every if gives]
        taken = [(key, box, at) for key, box, _, at in every]
        self.inward = Trip(self._to_owners(given), self._at_owner(given), self.rank, group)
        self.outward = Trip(self._at_owner(taken), self._to_owners(taken), self.rank, group)

    def _to_owners(self, pieces: list[tuple[Key, Box, int]]) -> list[MatrixPart]:
        """List the pieces that this process has, with the owners of their matrices."""
        mine = [(key, box) for key, box, at in pieces if at == self.rank]
        return [self._piece(key, self.owner[key], box) for key, box in mine]

    def _at_owner(self, pieces: list[tuple[Key, Box, int]]) -> list[MatrixPart]:
        """List the pieces of matrices that this process owns, with who has them."""
        return [self._piece(key, at, box) for key, box, at in pieces if key in self.shapes]

    def _pieces(self, parts: list[dict[str, Ends]]) -> Iterator[tuple[Key, Box, bool, int]]:
        """Yield what each rank has of each matrix, and whether it is the one that gives it.

        Of several that have the same, the owner gives it, or else the first.
        """
        for key, own in self.boxes.items():
            seen: set[Ends] = set()
            order = [self.owner[key], *(r for r in range(len(parts)) if r != self.owner[key])]
            for rank in order:
                box = overlap(own, tuple(slice(*ends) for ends in parts[rank][key[0]]))
                if box is not None:
                    yield key, box, _ends(box) not in seen, rank
                    seen.add(_ends(box))

    def _piece(self, key: Key, peer: int, box: Box) -> MatrixPart:
        return MatrixPart(
            key=key,
            peer=peer,
            of_matrix=relative(box, self.boxes[key]),
            of_part=relative(box, self.mine[key[0]]),
            shape=tuple(one.stop - one.start for one in box),
        )

    def gather(self, local: Mapping[str, Tensor]) -> dict[Key, Tensor]:
        """Gather the whole of each matrix that this process owns.

        Args:
            local: this process's part of each parameter, all of one dtype.
        """
        dtype = next((tensor.dtype for tensor in local.values()), torch.float32)
        like = torch.empty(0, dtype=dtype, device=self.device)
        whole = {key: like.new_empty(shape) for key, shape in self.shapes.items()}
        for piece in self.inward.kept:
            whole[piece.key][piece.of_matrix] = local[piece.key[0]][piece.of_part]
        going = {n: local[p.key[0]][p.of_part] for n, p in enumerate(self.inward.away)}
        for piece, values in self.inward.send(going, like):
            whole[piece.key][piece.of_matrix] = values
        return whole

    def scatter(
        self, whole: Mapping[Key, Tensor], dtype: torch.dtype
    ) -> Iterator[tuple[MatrixPart, Tensor]]:
        """Yield each piece that this process has, with what its owner made of it.

        Args:
            whole: each matrix that this process owns.
            dtype: of all of them.
        """
        for piece in self.outward.kept:
            yield piece, whole[piece.key][piece.of_matrix]
        like = torch.empty(0, dtype=dtype, device=self.device)
        going = {n: whole[p.key][p.of_matrix] for n, p in enumerate(self.outward.away)}
        yield from self.outward.send(going, like)


def owners(costs: Mapping[Key, float], count: int) -> dict[Key, int]:
    """Assign each matrix to a rank so that loads are nearly even."""
    load = [0.0] * count
    assignment = {}
    for key in sorted(costs, key=lambda key: (-costs[key], key)):
        assignment[key] = min(range(count), key=lambda rank: load[rank])
        load[assignment[key]] += costs[key]
    return assignment


def overlap(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes; None if empty."""
    starts = [max(a.start, b.start) for a, b in zip(one, other, strict=True)]
    stops = [min(a.stop, b.stop) for a, b in zip(one, other, strict=True)]
    if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
        return None
    return tuple(map(slice, starts, stops))


def relative(box: Box, outer: Box) -> Box:
    """Return a box as an index relative to an enclosing box."""
    return tuple(
        slice(a.start - b.start, a.stop - b.start) for a, b in zip(box, outer, strict=True)
    )


def _ends(box: Box) -> Ends:
    return tuple((one.start, one.stop) for one in box)
