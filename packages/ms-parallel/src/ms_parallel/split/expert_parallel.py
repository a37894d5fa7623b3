"""Shares out the experts of a layer over processes, and brings tokens to them and back.

Each process permutes its tokens by expert as if it had all of them, so that what goes to a process
lies together. What comes is put in the order of experts, and of senders for each; what experts make
of it goes the way back, and the process that sent a token weighs and adds up its rows in the order
of its choices. So a token's sum is the one that a process alone computes.
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
from ms_parallel.models.experts.kept import decide
from ms_parallel.operators.cpu import has_no_values
from ms_parallel.torch_private import unsafe_view


def split_experts(model: nn.Module, groups: Groups) -> None:
    """Leave each process its share of every layer's experts, in place.

    Parameters become DTensors on the expert axis, and on the tensor axis where they were split over
    it before.

    Args:
        model: split over the tensor axis, and not sharded yet.
        groups: the layout's processes.
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
    """Return the same values, not as a view: FSDP warns that it could lose its hook at one."""
    same: Tensor = unsafe_view(out, out.shape)
    return same


def shard_dim(parameter: Tensor, parts: int) -> int:
    """Choose the dim along which an expert parameter is sharded over the processes that have it.

    Whole experts where they divide; else a dim that does, as shards of other dims cannot be uneven.

    Args:
        parameter: as `split_experts` leaves it.
        parts: how many processes shard it.
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
    """How rows of tokens travel in one layer of one forward."""

    group: dist.ProcessGroup
    sent: list[int]
    """Rows that go to each process."""
    got: list[int]
    """Rows that come from each."""
    order: Tensor
    """For each row that came, in the order of experts: which it is in the order of senders."""
    inverse: Tensor

    def there(self, rows: Tensor) -> Tensor:
        """Send rows, which lie by receiver, and return what came here by expert."""
        return self._exchange(rows, self.sent, self.got).index_select(0, self.order)

    def back(self, rows: Tensor) -> Tensor:
        """Send the rows back to the processes and places that they came from."""
        return self._exchange(rows.index_select(0, self.inverse), self.got, self.sent)

    def _exchange(self, rows: Tensor, sent: list[int], got: list[int]) -> Tensor:
        come = rows.new_empty(sum(got), *rows.shape[1:])
        dist.all_to_all_single(come, rows.contiguous(), got, sent, group=self.group)
        return come


class _Travel(torch.autograd.Function):
    """Rows that travel a route; their gradients travel it the other way, without sums."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: _Route, home: bool) -> Tensor:
        """Turn rows (T, H) into as many as come."""
        ctx.route, ctx.home = route, home
        return route.back(rows) if home else route.there(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Give the gradient of the rows alone."""
        route: _Route = ctx.route
        return route.there(gradient) if ctx.home else route.back(gradient), None, None


def _dispatch(
    rows: Tensor, counts: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Back]:
    """Send rows to the processes of their experts, as `Dispatch` says.

    All processes of the group call it, also those without a row. A recomputation takes over what
    was counted, as it does what was chosen.
    """
    both = decide(lambda: _counts(counts, group))
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
