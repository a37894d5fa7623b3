"""Reductions over ranks on devices of several kinds: native within a kind, gloo between kinds.

Each kind first reduces over its native collectives (NCCL, HCCL, or gloo on CPUs). One rank per kind
copies the result to host memory, reduces it with the other kinds, and broadcasts it within its
kind. All ranks of all kinds therefore have bitwise the same result.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve, frozen
from torch.distributed.device_mesh import DeviceMesh

from ms_parallel.cluster.layout import Layout
from ms_parallel.cluster.mixed.devices import Devices
from ms_parallel.errors import LayoutError

HOST = torch.device("cpu")


@frozen(kw_only=True)
class KindGroups:
    """Groups of one process for reductions over ranks with the same weights."""

    device: torch.device
    same_kind_group: Any
    """Processes of the same kind, with native collectives; None if this is the only process."""
    leader: int
    """Global rank of this kind's leader."""
    leaders: Any
    """Leaders of all kinds, with gloo; None on other ranks, and with one kind."""
    pipeline_group: Any = None
    """Processes of the same kind in this pipeline, with native messages; None to use gloo."""

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        """Reduce `tensor` in place over all ranks with the same weights."""
        # 1. Within each kind.
        if self.same_kind_group is not None:
            dist.all_reduce(tensor, op=op, group=self.same_kind_group)
        # 2. Between the leaders of the kinds.
        if self.leaders is not None:
            host = tensor.to(HOST)
            dist.all_reduce(host, op=op, group=self.leaders)
            if host is not tensor:
                tensor.copy_(host)
        # 3. From each leader to its kind, so that all ranks have the same bits.
        if self.same_kind_group is not None:
            dist.broadcast(tensor, self.leader, group=self.same_kind_group)
        return tensor

    def align(self, tensor: torch.Tensor) -> None:
        """Broadcast the first rank's tensor to all."""
        if self.leaders is not None:
            host = tensor.to(HOST)
            dist.broadcast(host, group_src=0, group=self.leaders)
            if host is not tensor:
                tensor.copy_(host)
        if self.same_kind_group is not None:
            dist.broadcast(tensor, self.leader, group=self.same_kind_group)


def check_mixed(layout: Layout) -> None:
    """Check that mixed kinds of devices support a layout.

    Raises:
        LayoutError: devices of different kinds would have to exchange tensors within a block.
    """
    for axis in ("tensor", "context", "expert"):
        size = getattr(layout, axis)
        if size > 1:
            raise LayoutError(
                f"devices of several kinds do not support {axis}={size}, whose ranks exchange"
                f" tensors within each block; set {axis}=1 and use its processes for data or"
                " pipeline"
            )
    if layout.shards > 1:
        raise LayoutError(
            f"devices of several kinds cannot shard weights over {layout.shards} ranks, which"
            " gather them in each block; set sharding to 'replicate'"
        )


def create_kind_groups(layout: Layout, devices: Devices, device: torch.device) -> KindGroups:
    """Create the groups of all kinds on all stages. Collective."""
    # `new_group` is collective: every process takes part in creating every group.
    rank_here = dist.get_rank()
    groups: KindGroups | None = None
    for stage in range(layout.pipeline):
        ranks = [rank for rank in range(layout.world_size) if layout.place(rank).pipeline == stage]
        by_kind: dict[str, list[int]] = {}
        for rank in ranks:
            by_kind.setdefault(devices.kinds[rank], []).append(rank)
        stage_groups = _groups(by_kind)
        if rank_here in ranks:
            device_type = devices.kinds[rank_here]
            groups = KindGroups(
                device=device,
                same_kind_group=stage_groups[device_type],
                leader=by_kind[device_type][0],
                leaders=stage_groups["leaders"] if rank_here == by_kind[device_type][0] else None,
            )
    assert groups is not None
    # Ranks of one data rank's pipeline that have the same kind send each other native messages.
    for data_rank in range(layout.data_ranks):
        ranks = [rank for rank in range(layout.world_size) if layout.place(rank).rank == data_rank]
        for device_type in dict.fromkeys(devices.kinds[rank] for rank in ranks):
            same_kind = [rank for rank in ranks if devices.kinds[rank] == device_type]
            if device_type == "cpu" or len(same_kind) == 1:
                continue
            pipeline_group = dist.new_group(same_kind, backend=_backend(device_type))
            groups = (
                evolve(groups, pipeline_group=pipeline_group) if rank_here in same_kind else groups
            )
    return groups


def single_process_mesh(device: torch.device) -> DeviceMesh:
    """Create a mesh of this process only, to wrap weights that are not sharded."""
    group = dist.new_group(
        [dist.get_rank()], backend=_backend(device.type), use_local_synchronization=True
    )
    return DeviceMesh.from_group(group, device.type)


def _groups(by_kind: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Create a group per kind with several ranks, and a group of the kinds' leaders."""
    groups: dict[str, Any] = {}
    for device_type, ranks in by_kind.items():
        groups[device_type] = None
        if len(ranks) > 1:
            groups[device_type] = dist.new_group(list(ranks), backend=_backend(device_type))
    leaders = [ranks[0] for ranks in by_kind.values()]
    groups["leaders"] = dist.new_group(leaders, backend="gloo") if len(leaders) > 1 else None
    return groups


def _backend(device_type: str) -> str:
    """Backend that exchanges tensors of a kind; only its members need to have it."""
    if device_type == "cpu":
        return "gloo"
    registered = dist.Backend.default_device_backend_map.get(device_type)
    return f"cpu:gloo,{device_type}:{registered or NATIVE.get(device_type, device_type)}"


NATIVE = {"cuda": "nccl", "npu": "hccl", "xpu": "xccl"}
"""Backends of kinds that this process's torch does not know."""
