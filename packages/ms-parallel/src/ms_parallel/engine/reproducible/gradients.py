"""Gradients of each row, summed over all rows in the order of one fixed tree.

Each process sums its own rows as far as the tree allows. It then receives the remaining nodes of
all other processes, restricted to its part of each weight, and sums those.
"""

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from attrs import define, field, frozen
from torch import Tensor, nn

from ms_parallel.cluster.groups import Groups
from ms_parallel.engine.gradients import BUCKET_BYTES
from ms_parallel.engine.reproducible.rows import BatchRows
from ms_parallel.engine.reproducible.tree import Node, RowTree, nodes_of
from ms_parallel.split.part import local_part, part_of
from ms_parallel.split.whole_gradients import take_gradients
from ms_parallel.torch_private import foreach_add_

Sums = dict[str, Tensor]
"""Unsharded gradients by parameter name."""


def _add(first: Sums, second: Sums) -> Sums:
    foreach_add_(list(first.values()), list(second.values()))
    return first


@define
class StageGradients:
    """Gradients of one stage in one update."""

    tree: RowTree[Sums]
    incomplete: dict[int, Sums] = field(factory=dict)
    """Gradient sums of microbatches whose weight gradients are partly deferred."""


class RowGradients:
    """Collects gradients of this process's stages per row, and sums them in a fixed order.

    Args:
        stages: this process's stages by number.
        parameters: trainable parameters by name.
        groups: process groups of the layout.
        copy: (owner, name) if head and embedding share a weight on one stage: the head's gradient
            is collected under `name` and added last, as with two stages. None otherwise.
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
        self.stage_gradients: dict[int, StageGradients] = {}
        self.exchange = GradientExchange.create(self._local_ranges(), groups)

    def _local_ranges(self) -> dict[str, tuple[int, int]]:
        """Return the element range of the local part of each parameter."""
        ranges = {}
        with torch.no_grad():
            for name in (name for names in self.of_stage.values() for name in names):
                # Shards are consecutive rows of dim 0, so each is one range of the flattened
                # weight.
                parameter = self.parameters[name]
                part = part_of(parameter)
                row = parameter[:1].numel() if parameter.dim() > 1 else 1
                start = part.offsets[0] * row if part.offsets else 0
                ranges[name] = (start, start + part.local.numel())
        if self.copy is not None:
            ranges[self.copy[1]] = ranges[self.copy[0]]
        return ranges

    def begin(self, rows: BatchRows) -> None:
        """Reset, and expect the gradients of a new batch."""
        self.rows, self.alias = rows, None
        self.stage_gradients = {
            stage: StageGradients(RowTree(rows.total, _add)) for stage in self.stages
        }

    def head(self, weight: Tensor) -> Tensor:
        """Return the head's weight; if tied, an alias that accumulates a separate gradient."""
        if self.copy is None or not (weight.requires_grad and torch.is_grad_enabled()):
            return weight
        if self.alias is None:
            # A separate leaf, so that autograd does not add the head's gradient to the
            # embedding's.
            self.alias = weight.detach().requires_grad_()
        return self.alias

    def take(self, stage: int, microbatch: int, complete: bool) -> None:
        """Collect the gradients that a backward left in a stage's parameters.

        Args:
            stage: stage number.
            microbatch: local number of the microbatch, which has one row.
            complete: whether no gradients of this row are still missing.
        """
        gradients, stage_gradients = (
            take_gradients(self.stages[stage], self.names),
            self.stage_gradients[stage],
        )
        if self.copy is not None and self.alias is not None and self.alias.grad is not None:
            owner, name = self.copy
            gradients[name] = self.alias.grad.to(self.parameters[owner].dtype)
            self.alias.grad = None
        # With a split backward, a row's gradients arrive in several calls.
        earlier = stage_gradients.incomplete.pop(microbatch, {})
        for name, gradient in earlier.items():
            gradients[name] = gradient.add_(gradients[name]) if name in gradients else gradient
        if not complete:
            stage_gradients.incomplete[microbatch] = gradients
            return
        # Every node of the tree has all names, with zeros for unused weights.
        row_gradients = {
            name: self._unsharded(gradients.pop(name, None), name) for name in self._names(stage)
        }
        stage_gradients.tree.put((0, self.rows.local[microbatch]), row_gradients)

    def _names(self, stage: int) -> list[str]:
        return [*self.of_stage[stage], *([self.copy[1]] if self.copy else [])]

    def _unsharded(self, gradient: Tensor | None, name: str) -> Tensor:
        """Return the unsharded gradient in the weight's dtype; zeros for a missing gradient."""
        owner = self.copy[0] if self.copy and name == self.copy[1] else name
        parameter = self.parameters[owner]
        if gradient is None:
            local = local_part(parameter)
            return torch.zeros(parameter.shape, dtype=local.dtype, device=local.device)
        return gradient.to(parameter.dtype).contiguous()

    def total(self) -> dict[str, Tensor]:
        """Return the local part of each gradient of the global batch, by name."""
        totals: dict[str, Tensor] = {}
        for stage in sorted(self.stage_gradients):
            tree = self.stage_gradients.pop(stage).tree
            # The exchange empties the tree bucket by bucket, which frees the unsharded
            # gradients.
            for name, part in self.exchange.sums(tree, self._names(stage), self.rows):
                owner = self.copy[0] if self.copy and name == self.copy[1] else name
                totals[name] = part.view_as(local_part(self.parameters[owner]))
        if self.copy is not None:
            # Added after the sum over rows, in the same order as `add_tied` over two stages.
            owner, name = self.copy
            totals[owner] += totals.pop(name)
        self.alias = None
        for name, parameter in self.parameters.items():
            if name not in totals:  # frozen
                totals[name] = torch.zeros_like(local_part(parameter))
        return {name: totals[name] for name in self.parameters}


@frozen(kw_only=True)
class GradientExchange:
    """Exchange of gradient sums: each process gets its part of all other ranks' nodes."""

    groups: Groups
    ranges: tuple[Mapping[str, tuple[int, int]], ...]
    """Element range of each data rank's part of each weight."""

    @classmethod
    def create(
        cls, local_ranges: Mapping[str, tuple[int, int]], groups: Groups
    ) -> "GradientExchange":
        """Gather the ranges of all data ranks; all processes call it."""
        count = groups.place.count
        ranges: list[Mapping[str, tuple[int, int]]] = [local_ranges] * count
        if count > 1:
            dist.all_gather_object(ranges, local_ranges, group=groups.group("rows"))
        return cls(groups=groups, ranges=tuple(ranges))

    def sums(
        self, tree: RowTree[Sums], names: list[str], rows: BatchRows
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the local flat part of each gradient summed over all rows; empties the tree."""
        nodes = [tree.nodes[node] for node in sorted(tree.nodes)]
        for bucket in _buckets(names, nodes[0]):
            flat = [{name: node.pop(name).flatten() for name in bucket} for node in nodes]
            # A single data rank has all rows, so its tree is one node.
            if len(self.ranges) == 1:
                (node,) = flat
                yield from node.items()
                continue
            local_ranges = self.ranges[self.groups.place.rank]
            sizes = [local_ranges[name][1] - local_ranges[name][0] for name in bucket]
            yield from zip(bucket, torch.split(self._sum(flat, rows), sizes), strict=True)

    def _sum(self, nodes: list[Sums], rows: BatchRows) -> Tensor:
        """Sum some gradients over all rows; returns the local parts, flat and concatenated.

        Replicas of the same shard each sum an equal slice and then all-gather.
        """
        replicas = len(self.ranges) // self.groups.layout.shards
        data_rank, group = self.groups.place.rank, self.groups.group("rows")
        pieces, slice_sizes = [], []
        for rank, ranges in enumerate(self.ranges):
            # Elements of the receiver's part of this bucket.
            length = sum(ranges[name][1] - ranges[name][0] for name in nodes[0])
            slice_size = -(-length // replicas)
            slice_sizes.append(slice_size)
            # Ranks are ordered (replica, shard), so this is the start of the receiver's slice.
            start = rank // self.groups.layout.shards * slice_size
            for node in nodes:
                parts = torch.cat([node[name][slice(*ranges[name])] for name in node])
                part = parts[start : start + slice_size]
                pieces.append(torch.nn.functional.pad(part, (0, slice_size - len(part))))
        # How many tree nodes each rank sends follows from its rows alone.
        counts = [len(nodes_of(rows.of(rank), rows.total)) for rank in range(len(self.ranges))]
        send_buffer = torch.cat(pieces)
        receive_buffer = send_buffer.new_empty(sum(counts) * slice_sizes[data_rank])
        receive_sizes = [count * slice_sizes[data_rank] for count in counts]
        dist.all_to_all_single(
            receive_buffer,
            send_buffer,
            receive_sizes,
            [len(nodes) * size for size in slice_sizes],  # elements sent to each rank
            group=group,
        )
        # (nodes of all ranks, slice) -> (slice,)
        total = _sum_nodes(receive_buffer.view(-1, slice_sizes[data_rank]), rows)
        if replicas == 1:
            return total
        gathered = [torch.empty_like(total) for _ in range(replicas)]
        dist.all_gather(gathered, total.contiguous(), group=self.groups.group("replicas"))
        # The replicas' slices in order, without the padding of the last one.
        ranges = self.ranges[data_rank]
        return torch.cat(gathered)[: sum(ranges[name][1] - ranges[name][0] for name in nodes[0])]


def _sum_nodes(received: Tensor, rows: BatchRows) -> Tensor:
    """Sum the remaining nodes (nodes, n) of all data ranks in the order of the tree."""
    tree: RowTree[Tensor] = RowTree(rows.total, lambda first, second: first.add_(second))
    nodes: list[Node] = [
        node for rank in range(len(rows.counts)) for node in nodes_of(rows.of(rank), rows.total)
    ]
    for node, values in zip(nodes, received, strict=True):
        tree.put(node, values)
    return tree.root


def _buckets(names: list[str], gradients: Sums) -> Iterator[list[str]]:
    """Yield names of gradients of one dtype that are sent together."""
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
