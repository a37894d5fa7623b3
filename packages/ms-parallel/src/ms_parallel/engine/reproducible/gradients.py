"""Gradients of each row, and their sums over all rows, in the order of one tree.

Each process adds up what the tree lets it of its own rows. Then every process gets, of all nodes
that the others are left with, its part of each weight, and adds those.
"""

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from attrs import define, field, frozen
from torch import Tensor, nn

from ms_parallel.cluster.groups import Groups
from ms_parallel.engine.gradients import BUCKET_BYTES
from ms_parallel.engine.reproducible.rows import Rows
from ms_parallel.engine.reproducible.tree import Node, RowTree, nodes_of
from ms_parallel.split.part import local_part, part_of
from ms_parallel.split.whole_gradients import take_gradients
from ms_parallel.torch_private import foreach_add_

Sums = dict[str, Tensor]
"""Gradients by name, as whole as the parameters."""


def _add(first: Sums, second: Sums) -> Sums:
    foreach_add_(list(first.values()), list(second.values()))
    return first


@define
class StageGradients:
    """Gradients of one stage in one update."""

    tree: RowTree[Sums]
    incomplete: dict[int, Sums] = field(factory=dict)
    """Sums of microbatches whose gradients of weights are in part put off."""


class RowGradients:
    """Takes the gradients of this process's stages row by row, and adds them up.

    Args:
        stages: by number.
        parameters: what is trained of them, by name.
        groups: the layout's processes.
        copy: (owner, name): the gradient that the head has of the embedding's weight is kept under
            this name and added last, as where they stand on two stages; None where they do not
            share a weight on one stage.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        parameters: Mapping[str, Tensor],
        groups: Groups,
        copy: tuple[str, str] | None,
    ) -> None:
        self.stages, self.parameters, self.groups, self.copy = stages, parameters, groups, copy
        self.names = {id(parameter): name for name, parameter in parameters.items()}
        self.of_stage = {
            number: [
                name
                for parameter in stage.parameters()
                if (name := self.names.get(id(parameter))) and parameter.requires_grad
            ]
            for number, stage in stages.items()
        }
        self.alias: Tensor | None = None
        self.found: dict[int, StageGradients] = {}
        self.exchange = GradientExchange.meet(self._own_ranges(), groups)

    def _own_ranges(self) -> dict[str, tuple[int, int]]:
        """Find where this process's part of each parameter begins and ends in all its elements."""
        found = {}
        with torch.no_grad():
            for name in (name for names in self.of_stage.values() for name in names):
                parameter = self.parameters[name]
                part = part_of(parameter)
                row = parameter[:1].numel() if parameter.dim() > 1 else 1
                start = part.offsets[0] * row if part.offsets else 0
                found[name] = (start, start + part.local.numel())
        if self.copy is not None:
            found[self.copy[1]] = found[self.copy[0]]
        return found

    def begin(self, rows: Rows) -> None:
        """Forget what there was, and expect the gradients of a batch."""
        self.rows, self.alias = rows, None
        self.found = {stage: StageGradients(RowTree(rows.total, _add)) for stage in self.stages}

    def head(self, weight: Tensor) -> Tensor:
        """Return the head's weight; where tied, the same numbers with a gradient of their own."""
        if self.copy is None or not (weight.requires_grad and torch.is_grad_enabled()):
            return weight
        if self.alias is None:
            self.alias = weight.detach().requires_grad_()
        return self.alias

    def take(self, stage: int, microbatch: int, complete: bool) -> None:
        """Take what a backward has left in a stage's parameters.

        Args:
            stage: whose.
            microbatch: one row, by its number here.
            complete: whether it is all of that row's.
        """
        found, mine = take_gradients(self.stages[stage], self.names), self.found[stage]
        if self.copy is not None and self.alias is not None and self.alias.grad is not None:
            owner, name = self.copy
            found[name] = self.alias.grad.to(self.parameters[owner].dtype)
            self.alias.grad = None
        before = mine.incomplete.pop(microbatch, {})
        for name, gradient in before.items():
            found[name] = gradient.add_(found[name]) if name in found else gradient
        if not complete:
            mine.incomplete[microbatch] = found
            return
        every = {name: self._whole(found.pop(name, None), name) for name in self._names(stage)}
        mine.tree.put((0, self.rows.mine[microbatch]), every)

    def _names(self, stage: int) -> list[str]:
        return [*self.of_stage[stage], *([self.copy[1]] if self.copy else [])]

    def _whole(self, gradient: Tensor | None, name: str) -> Tensor:
        """Return a whole gradient in the weight's precision; zeros where none flowed."""
        owner = self.copy[0] if self.copy and name == self.copy[1] else name
        parameter = self.parameters[owner]
        if gradient is None:
            local = local_part(parameter)
            return torch.zeros(parameter.shape, dtype=local.dtype, device=local.device)
        return gradient.to(parameter.dtype).contiguous()

    def total(self) -> dict[str, Tensor]:
        """Compute this process's part of each gradient of the global batch, by name."""
        found: dict[str, Tensor] = {}
        for stage in sorted(self.found):
            tree = self.found.pop(stage).tree
            for name, part in self.exchange.sums(tree, self._names(stage), self.rows):
                owner = self.copy[0] if self.copy and name == self.copy[1] else name
                found[name] = part.view_as(local_part(self.parameters[owner]))
        if self.copy is not None:
            owner, name = self.copy
            found[owner] += found.pop(name)
        self.alias = None
        for name, parameter in self.parameters.items():
            if name not in found:  # frozen
                found[name] = torch.zeros_like(local_part(parameter))
        return {name: found[name] for name in self.parameters}


@frozen(kw_only=True)
class GradientExchange:
    """Brings to each process its part of all that others have added up."""

    groups: Groups
    ranges: tuple[Mapping[str, tuple[int, int]], ...]
    """Where each data rank's part of each weight begins and ends."""

    @classmethod
    def meet(cls, mine: Mapping[str, tuple[int, int]], groups: Groups) -> "GradientExchange":
        """Learn which parts the other data ranks have; all processes call it."""
        count = groups.place.count
        every: list[Mapping[str, tuple[int, int]]] = [mine] * count
        if count > 1:
            dist.all_gather_object(every, mine, group=groups.group("rows"))
        return cls(groups=groups, ranges=tuple(every))

    def sums(
        self, tree: RowTree[Sums], names: list[str], rows: Rows
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield this process's flat part of each gradient summed over all rows; empty the tree."""
        nodes = [tree.nodes[node] for node in sorted(tree.nodes)]
        for bucket in _buckets(names, nodes[0]):
            flat = [{name: node.pop(name).flatten() for name in bucket} for node in nodes]
            if len(self.ranges) == 1:
                (node,) = flat
                yield from node.items()
                continue
            mine = self.ranges[self.groups.place.rank]
            sizes = [mine[name][1] - mine[name][0] for name in bucket]
            yield from zip(bucket, torch.split(self._sum(flat, rows), sizes), strict=True)

    def _sum(self, nodes: list[Sums], rows: Rows) -> Tensor:
        """Sum some gradients over all rows into this process's parts, one behind another.

        Where several processes hold the same parts, each adds up a share, and all get those.
        """
        replicas = len(self.ranges) // self.groups.layout.shards
        here, group = self.groups.place.rank, self.groups.group("rows")
        given, shares = [], []
        for rank, ranges in enumerate(self.ranges):
            length = sum(ranges[name][1] - ranges[name][0] for name in nodes[0])
            share = -(-length // replicas)
            shares.append(share)
            start = rank // self.groups.layout.shards * share
            for node in nodes:
                parts = torch.cat([node[name][slice(*ranges[name])] for name in node])
                part = parts[start : start + share]
                given.append(torch.nn.functional.pad(part, (0, share - len(part))))
        counts = [len(nodes_of(rows.of(rank), rows.total)) for rank in range(len(self.ranges))]
        sent = torch.cat(given)
        come = sent.new_empty(sum(counts) * shares[here])
        got = [count * shares[here] for count in counts]
        dist.all_to_all_single(
            come, sent, got, [len(nodes) * share for share in shares], group=group
        )
        total = _added(come.view(-1, shares[here]), rows)
        if replicas == 1:
            return total
        every = [torch.empty_like(total) for _ in range(replicas)]
        dist.all_gather(every, total.contiguous(), group=self.groups.group("replicas"))
        ranges = self.ranges[here]
        return torch.cat(every)[: sum(ranges[name][1] - ranges[name][0] for name in nodes[0])]


def _added(come: Tensor, rows: Rows) -> Tensor:
    """Add up over all rows what data ranks are left with, (nodes, n), in their order."""
    tree: RowTree[Tensor] = RowTree(rows.total, lambda first, second: first.add_(second))
    every: list[Node] = [
        node for rank in range(len(rows.counts)) for node in nodes_of(rows.of(rank), rows.total)
    ]
    for node, values in zip(every, come, strict=True):
        tree.put(node, values)
    return tree.root


def _buckets(names: list[str], gradients: Sums) -> Iterator[list[str]]:
    """Yield names whose gradients, of one dtype, travel together."""
    bucket: list[str] = []
    size = 0
    for name in names:
        gradient = gradients[name]
        if bucket and (
            size + gradient.nbytes > BUCKET_BYTES or gradient.dtype != gradients[bucket[0]].dtype
        ):
            yield bucket
            bucket, size = [], 0
        bucket.append(name)
        size += gradient.nbytes
    if bucket:
        yield bucket
