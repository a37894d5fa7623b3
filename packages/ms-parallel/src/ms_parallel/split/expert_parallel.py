"""Expert parallelism: experts split over processes, with all-to-all dispatch of tokens.

Each process sorts its tokens by expert, so rows for one receiver are contiguous. Received rows are
sorted by expert, then by sender. Expert outputs return by the same route, and the sender combines
the rows of a token in the order of its choices, so the result is the same as on a single process.
"""

from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from ms_parallel.cluster.groups import Groups
from ms_parallel.host_copy import send
from ms_parallel.models.experts.grouped import Combine, Experts
from ms_parallel.models.experts.replay import replayed
from ms_parallel.operators.cpu import has_no_values
from ms_parallel.torch_private import unsafe_view


def split_experts(model: nn.Module, groups: Groups) -> None:
    """Split the experts of every layer over processes, in place.

    Parameters become DTensors on the expert axis, and also on the tensor axis if already split.

    Args:
        model: after the tensor-parallel split, before sharding.
        groups: process groups of the layout.
    """
    mesh = groups.experts
    if mesh is None:
        return
    group = mesh.get_group()
    for experts in [module for module in model.modules() if isinstance(module, Experts)]:
        for linear in (experts.gate_up_proj, experts.down_proj):
            for name, parameter in list(linear.named_parameters(recurse=False)):
                split = local_experts(parameter.detach(), mesh)
                linear.register_parameter(
                    name, nn.Parameter(split, requires_grad=parameter.requires_grad)
                )
        experts.dispatch = lambda rows, counts: _dispatch(rows, counts, group)
        experts.register_forward_hook(_no_view)


def _no_view(_: nn.Module, inputs: object, out: Tensor) -> Tensor:
    """Return the output as a non-view tensor: FSDP warns that hooks on views may be lost."""
    plain: Tensor = unsafe_view(out, out.shape)
    return plain


def shard_dim(parameter: Tensor, parts: int) -> int:
    """Choose the dim along which FSDP shards an expert parameter.

    The expert dim if `parts` divides it; otherwise a dim that divides evenly, since FSDP allows
    uneven shards only along dim 0.

    Args:
        parameter: expert parameter after `split_experts`.
        parts: number of shards.
    """
    split = set()
    local = parameter
    if isinstance(parameter, DTensor):
        split = {p.dim for p in parameter.placements if isinstance(p, Shard)}
        local = parameter.to_local()
    free = (dim for dim in range(1, local.ndim) if dim not in split)
    fits = [dim for dim in (0, *free) if local.shape[dim] % parts == 0]
    # Uneven shards along the expert dim are the fallback.
    return fits[0] if fits else 0


def local_experts(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return a DTensor of a tensor (experts, ...) that stores only this process's experts."""
    local = tensor
    meshes, placements = [mesh], list[Placement]([Shard(0)])
    # Already split over tensor ranks: a DTensor over both meshes.
    if isinstance(local, DTensor):
        meshes.append(local.device_mesh)
        placements += local.placements
        local = local.to_local()
    share: Tensor = DTensor.from_local(
        local.chunk(mesh.size())[mesh.get_local_rank()],
        mesh if len(meshes) == 1 else DeviceMesh._concatenate(meshes),
        placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    return share


@frozen(kw_only=True, eq=False)
class _Route:
    """All-to-all route of token rows in one layer of one forward pass."""

    group: dist.ProcessGroup
    sent_counts: list[int]
    """Number of rows for each receiver."""
    received_counts: list[int]
    """Number of rows from each sender."""
    order: Tensor
    """Permutation of received rows from sender order to expert order."""
    inverse: Tensor

    def send(self, rows: Tensor) -> Tensor:
        """Send rows sorted by receiver; return the received rows sorted by expert."""
        return self._exchange(rows, self.sent_counts, self.received_counts).index_select(
            0, self.order
        )

    def send_back(self, rows: Tensor) -> Tensor:
        """Return rows to their senders, in the original order."""
        return self._exchange(
            rows.index_select(0, self.inverse), self.received_counts, self.sent_counts
        )

    def _exchange(self, rows: Tensor, sent_counts: list[int], received_counts: list[int]) -> Tensor:
        received = rows.new_empty(sum(received_counts), *rows.shape[1:])
        dist.all_to_all_single(
            received, rows.contiguous(), received_counts, sent_counts, group=self.group
        )
        return received


class _Exchange(torch.autograd.Function):
    """Differentiable exchange along a route; gradients travel in the opposite direction."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: _Route, reverse: bool) -> Tensor:
        """Send rows (T, H) and return the received rows."""
        ctx.route, ctx.reverse = route, reverse
        return route.send_back(rows) if reverse else route.send(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the rows."""
        route: _Route = ctx.route
        return route.send(gradient) if ctx.reverse else route.send_back(gradient), None, None


def _dispatch(
    rows: Tensor, counts: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Combine]:
    """Send rows to the processes of their experts; implements `Dispatch`.

    Collective: processes without rows call it too. A recomputed block replays the counts, like the
    router's choices, so it needs no second exchange of counts.
    """
    all_counts = replayed(lambda: _counts(counts, group))
    if has_no_values(all_counts):  # fake tensors: assume equal numbers of rows in and out
        sent_counts = received_counts = [
            len(part) for part in rows.tensor_split(all_counts.shape[1])
        ]
        order = torch.empty(len(rows), dtype=torch.int64)
    else:
        # Rows per peer, summed over its experts.
        sent_counts, received_counts = all_counts.sum(2).tolist()
        # Rows arrive by sender, then expert; a stable sort by expert gives expert order.
        experts = torch.arange(all_counts.shape[2]).repeat(all_counts.shape[1])
        order = experts.repeat_interleave(all_counts[1].flatten()).argsort(stable=True)
    # inverse[order[i]] = i
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    route = _Route(
        group=group,
        sent_counts=sent_counts,
        received_counts=received_counts,
        order=send(order, rows.device),
        inverse=send(inverse, rows.device),
    )

    def combine(outputs: Tensor) -> Tensor:
        returned: Tensor = _Exchange.apply(outputs, route, True)  # type: ignore[no-untyped-call]
        return returned

    received: Tensor = _Exchange.apply(rows, route, False)  # type: ignore[no-untyped-call]
    return received, send(all_counts[1].sum(0), counts.device), combine


def _counts(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Count the rows that this process sends to each expert and receives for each of its experts.

    Args:
        counts: (E,) number of this process's rows by expert.
        group: the N processes over which experts are split.

    Returns:
        (2, N, E/N) int64 on the CPU: sent by receiver and expert, received by sender and expert.
    """
    sent_counts = counts.view(dist.get_world_size(group), -1)
    received_counts = torch.empty_like(sent_counts)
    dist.all_to_all_single(received_counts, sent_counts, group=group)
    return torch.stack((sent_counts, received_counts)).cpu()
