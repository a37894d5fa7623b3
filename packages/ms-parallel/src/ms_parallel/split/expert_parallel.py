"""Expert parallelism: experts split over processes, with all-to-all dispatch of tokens.

Each process sorts its tokens by expert, so rows for one receiver are contiguous. Received rows are
sorted by expert, then by sender. Expert outputs return by the same route, and the sender combines
the rows of a token in the order of its choices, so the result equals that of a single process.
"""

from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from ms_parallel.cluster.groups import Groups
from ms_parallel.models.experts.grouped import Back, Experts
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
                linear.register_parameter(name, _own_share(parameter, mesh))
        experts.dispatch = lambda rows, counts: _dispatch(rows, counts, group)
        experts.register_forward_hook(_no_view)


def _no_view(_: nn.Module, inputs: object, out: Tensor) -> Tensor:
    """Return the output as a non-view tensor: FSDP warns that hooks on views may be lost."""
    same: Tensor = unsafe_view(out, out.shape)
    return same


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
        split = {place.dim for place in parameter.placements if isinstance(place, Shard)}
        local = parameter.to_local()
    free = (dim for dim in range(1, local.ndim) if dim not in split)
    fits = [dim for dim in (0, *free) if local.shape[dim] % parts == 0]
    return fits[0] if fits else 0


def _own_share(parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """Return this process's experts of a parameter (experts, ...), as a DTensor of all of it."""
    local: Tensor = parameter.detach()
    meshes, placements = [mesh], list[Placement]([Shard(0)])
    if isinstance(local, DTensor):
        meshes.append(local.device_mesh)
        placements += local.placements
        local = local.to_local()
    share = DTensor.from_local(
        local.chunk(mesh.size())[mesh.get_local_rank()],
        mesh if len(meshes) == 1 else DeviceMesh._concatenate(meshes),
        placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return nn.Parameter(share, requires_grad=parameter.requires_grad)


@frozen(kw_only=True, eq=False)
class _Route:
    """All-to-all route of token rows in one layer of one forward pass."""

    group: dist.ProcessGroup
    sent: list[int]
    """Number of rows for each receiver."""
    got: list[int]
    """Number of rows from each sender."""
    order: Tensor
    """Permutation of received rows from sender order to expert order."""
    inverse: Tensor

    def there(self, rows: Tensor) -> Tensor:
        """Send rows sorted by receiver; return the received rows sorted by expert."""
        return self._exchange(rows, self.sent, self.got).index_select(0, self.order)

    def back(self, rows: Tensor) -> Tensor:
        """Return rows to their senders, in the original order."""
        return self._exchange(rows.index_select(0, self.inverse), self.got, self.sent)

    def _exchange(self, rows: Tensor, sent: list[int], got: list[int]) -> Tensor:
        come = rows.new_empty(sum(got), *rows.shape[1:])
        dist.all_to_all_single(come, rows.contiguous(), got, sent, group=self.group)
        return come


class _Travel(torch.autograd.Function):
    """Differentiable transfer along a route; gradients take the opposite direction."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: _Route, home: bool) -> Tensor:
        """Send rows (T, H) and return the received rows."""
        ctx.route, ctx.home = route, home
        return route.back(rows) if home else route.there(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the rows."""
        route: _Route = ctx.route
        return route.there(gradient) if ctx.home else route.back(gradient), None, None


def _dispatch(
    rows: Tensor, counts: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Back]:
    """Send rows to the processes of their experts, as `Dispatch` says.

    All processes of the group call it, also those without a row. A recomputation takes over what
    was counted, as it does what was chosen.
    """
    both = replayed(lambda: _counts(counts, group))
    if has_no_values(both):  # as many rows come as go
        sent = got = [len(part) for part in rows.tensor_split(both.shape[1])]
        order = torch.empty(len(rows), dtype=torch.int64)
    else:
        sent, got = both.sum(2).tolist()
        experts = torch.arange(both.shape[2]).repeat(both.shape[1])
        order = experts.repeat_interleave(both[1].flatten()).argsort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    route = _Route(
        group=group,
        sent=sent,
        got=got,
        order=order.to(rows.device),
        inverse=inverse.to(rows.device),
    )

    def back(made: Tensor) -> Tensor:
        home: Tensor = _Travel.apply(made, route, True)  # type: ignore[no-untyped-call]
        return home

    came: Tensor = _Travel.apply(rows, route, False)  # type: ignore[no-untyped-call]
    return came, both[1].sum(0).to(counts.device), back


def _counts(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Count this process's rows by receiver and its expert, and by sender and expert those for it.

    Args:
        counts: (E,) of this process's rows, by expert.
        group: of N processes that share out the experts.

    Returns:
        (2, N, E/N) int64 on the CPU.
    """
    sent = counts.view(dist.get_world_size(group), -1)
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=group)
    return torch.stack((sent, got)).cpu()
