"""Brings whole matrices to processes that own them, and what is made of them back to all parts."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from ms_parallel.cluster.groups import Groups
from ms_parallel.models.weight_names import Box
from ms_parallel.split.part import local_part, part_of

Key = tuple[str, int]
"""A parameter, and the number of one of its matrices."""
Route = list[tuple[Key, int, Box]]
"""What travels: of which matrix, from or to which process, which part of the parameter."""


class Exchange:
    """Each matrix has one owner among the processes that hold its stage; all of them call it.

    Owners are assigned by cost, the dearest first, each to the process with the least so far.

    Args:
        parameters: whose parts this process holds.
        boxes: each matrix, as a box of its parameter.
        costs: of the work on each matrix.
        groups: the layout's processes.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        boxes: Mapping[Key, Box],
        costs: Mapping[Key, float],
        groups: Groups,
    ) -> None:
        self.boxes = dict(boxes)
        self.group = groups.group("stage")
        self.rank, self.count = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.device = groups.device
        with torch.no_grad():
            parts = {name: part_of(parameter) for name, parameter in parameters.items()}
        self.mine = {name: part.box for name, part in parts.items()}
        self.shapes = {name: local_part(p).shape for name, p in parameters.items()}
        self.owner = owners(costs, self.count)
        every: list[dict[str, tuple[tuple[int, int], ...]]] = [{} for _ in range(self.count)]
        plain = {n: tuple((s.start, s.stop) for s in box) for n, box in self.mine.items()}
        if self.count > 1:
            dist.all_gather_object(every, plain, group=self.group)
        else:
            every = [plain]
        self.parts = [
            {name: tuple(slice(*ends) for ends in box) for name, box in of_rank.items()}
            for of_rank in every
        ]
        self.suppliers = {key: self._suppliers(key) for key in self.boxes}

    def _suppliers(self, key: Key) -> list[tuple[int, Box]]:
        """Who gives which part of a matrix: the owner where it has it, else the first that does."""
        found: dict[tuple[tuple[int, int], ...], int] = {}
        for rank in (self.owner[key], *range(self.count)):
            common = overlap(self.boxes[key], self.parts[rank][key[0]])
            if common is not None:
                found.setdefault(tuple((s.start, s.stop) for s in common), rank)
        return [(rank, tuple(slice(*ends) for ends in box)) for box, rank in found.items()]

    def gather(self, local: Mapping[str, Tensor]) -> dict[Key, Tensor]:
        """The whole of each matrix that this process owns.

        Args:
            local: this process's part of each parameter, all of one dtype.
        """
        dtype = next((tensor.dtype for tensor in local.values()), torch.float32)
        away: Route = [
            (key, self.owner[key], box)
            for key in self.boxes
            for rank, box in self.suppliers[key]
            if rank == self.rank
        ]
        here: Route = [
            (key, rank, box)
            for key in self.boxes
            if self.owner[key] == self.rank
            for rank, box in self.suppliers[key]
        ]
        whole = {
            key: torch.empty(
                [s.stop - s.start for s in self.boxes[key]], dtype=dtype, device=self.device
            )
            for key in self.boxes
            if self.owner[key] == self.rank
        }
        pieces = {
            (key, to): local[key[0]][relative(box, self.mine[key[0]])] for key, to, box in away
        }
        for (key, _, box), values in self._travel(away, pieces, here, dtype):
            whole[key][relative(box, self.boxes[key])] = values
        return whole

    def scatter(self, whole: Mapping[Key, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """This process's part of each parameter, of what owners made of its matrices.

        Args:
            whole: each matrix that this process owns.
            dtype: of all of them.
        """
        away, here = [], []
        for key, own in self.boxes.items():
            for rank, parts in enumerate(self.parts):
                box = overlap(own, parts[key[0]])
                if box is None:
                    continue
                if self.owner[key] == self.rank:
                    away.append((key, rank, box))
                if rank == self.rank:
                    here.append((key, self.owner[key], box))
        local = {
            name: torch.zeros(shape, dtype=dtype, device=self.device)
            for name, shape in self.shapes.items()
        }
        pieces = {(key, to): whole[key][relative(box, self.boxes[key])] for key, to, box in away}
        for (key, _, box), values in self._travel(away, pieces, here, dtype):
            local[key[0]][relative(box, self.mine[key[0]])] = values
        return local

    def _travel(
        self,
        away: Route,
        pieces: Mapping[tuple[Key, int], Tensor],
        here: Route,
        dtype: torch.dtype,
    ) -> list[tuple[tuple[Key, int, Box], Tensor]]:
        """Send what goes away, and give what comes; what stays is not sent."""
        kept = [(one, pieces[one[0], self.rank]) for one in here if one[1] == self.rank]
        if self.count == 1:
            return kept
        away = sorted((one for one in away if one[1] != self.rank), key=lambda one: one[1])
        here = sorted((one for one in here if one[1] != self.rank), key=lambda one: one[1])
        sent = [pieces[key, to].reshape(-1) for key, to, _ in away]
        empty = torch.empty(0, dtype=dtype, device=self.device)
        flat = torch.cat(sent) if sent else empty
        sizes = [_count(box) for _, _, box in here]
        come = torch.empty(sum(sizes), dtype=dtype, device=self.device)
        totals = [[0] * self.count, [0] * self.count]
        for side, route in zip(totals, (away, here), strict=True):
            for _, peer, box in route:
                side[peer] += _count(box)
        dist.all_to_all_single(come, flat, totals[1], totals[0], group=self.group)
        arrived = zip(here, torch.split(come, sizes), strict=True)
        return kept + [
            (one, values.view([s.stop - s.start for s in one[2]])) for one, values in arrived
        ]


def owners(costs: Mapping[Key, float], count: int) -> dict[Key, int]:
    """Who owns each matrix, so that the work of all is near to even."""
    load = [0.0] * count
    found = {}
    for key in sorted(costs, key=lambda key: (-costs[key], key)):
        found[key] = min(range(count), key=lambda rank: load[rank])
        load[found[key]] += costs[key]
    return found


def overlap(one: Box, other: Box) -> Box | None:
    """What two boxes have in common; None for nothing."""
    starts = [max(a.start, b.start) for a, b in zip(one, other, strict=True)]
    stops = [min(a.stop, b.stop) for a, b in zip(one, other, strict=True)]
    if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
        return None
    return tuple(map(slice, starts, stops))


def relative(box: Box, outer: Box) -> Box:
    """A box as an index into a greater one."""
    return tuple(
        slice(a.start - b.start, a.stop - b.start) for a, b in zip(box, outer, strict=True)
    )


def _count(box: Box) -> int:
    total = 1
    for one in box:
        total *= one.stop - one.start
    return total
