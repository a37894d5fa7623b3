"""Sums over ranks on unlike devices: inside a kind over its own group, between kinds through gloo.

Each kind adds up what its ranks have over its native collectives (NCCL, HCCL, or gloo on CPUs). One
rank of each kind takes the sum to the machine's memory, where they add up those of the kinds, and
hands it on inside its kind. So all ranks of all kinds have the same bits.
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
    """How one process takes part in the sums of the ranks that hold the same weights."""

    device: torch.device
    inside: Any
    """Processes of this kind among them, over its native collectives; None for this one alone."""
    first: int
    """The rank that speaks for them."""
    leaders: Any
    """Processes that speak for a kind each, over the machines' memory; None on others, and where
    all are of one kind."""

    line: Any = None
    """Processes of this kind in this pipeline, over native messages; None where gloo serves."""

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        """Sum (or `op`) `tensor` in place over all of them."""
        if self.inside is not None:
            dist.all_reduce(tensor, op=op, group=self.inside)
        if self.leaders is not None:
            host = tensor.to(HOST)
            dist.all_reduce(host, op=op, group=self.leaders)
            if host is not tensor:
                tensor.copy_(host)
        if self.inside is not None:
            dist.broadcast(tensor, self.first, group=self.inside)
        return tensor

    def align(self, tensor: torch.Tensor) -> None:
        """Give all of them what the first one has."""
        if self.leaders is not None:
            host = tensor.to(HOST)
            dist.broadcast(host, group_src=0, group=self.leaders)
            if host is not tensor:
                tensor.copy_(host)
        if self.inside is not None:
            dist.broadcast(tensor, self.first, group=self.inside)


def check_mixed(layout: Layout) -> None:
    """Check that processes on unlike devices can share out the work as a layout says.

    Raises:
        LayoutError: ranks would have to exchange tensors of unlike devices within a block.
    """
    for axis in ("tensor", "context", "expert"):
        size = getattr(layout, axis)
        if size > 1:
            raise LayoutError(
                f"devices of several kinds cannot stand on {axis}={size}, whose ranks exchange"
                f" tensors within each block; set {axis}=1 and give its processes to data or"
                " pipeline"
            )
    if layout.shards > 1:
        raise LayoutError(
            f"devices of several kinds cannot shard weights over {layout.shards} ranks, which"
            " gather them in each block; set sharding to 'replicate'"
        )


def meet_kinds(layout: Layout, devices: Devices, device: torch.device) -> KindGroups:
    """Make the groups of all kinds on all stages; every process calls this, at the same place."""
    mine = dist.get_rank()
    found: KindGroups | None = None
    for stage in range(layout.pipeline):
        ranks = [rank for rank in range(layout.world_size) if layout.place(rank).pipeline == stage]
        by_kind: dict[str, list[int]] = {}
        for rank in ranks:
            by_kind.setdefault(devices.kinds[rank], []).append(rank)
        made = _groups(by_kind)
        if mine in ranks:
            kind = devices.kinds[mine]
            found = KindGroups(
                device=device,
                inside=made[kind],
                first=by_kind[kind][0],
                leaders=made["leaders"] if mine == by_kind[kind][0] else None,
            )
    assert found is not None
    for reader in range(layout.readers):
        ranks = [rank for rank in range(layout.world_size) if layout.place(rank).rank == reader]
        for kind in dict.fromkeys(devices.kinds[rank] for rank in ranks):
            alike = [rank for rank in ranks if devices.kinds[rank] == kind]
            if kind == "cpu" or len(alike) == 1:
                continue
            line = dist.new_group(alike, backend=_backend(kind))
            found = evolve(found, line=line) if mine in alike else found
    return found


def alone_on(device: torch.device) -> DeviceMesh:
    """Make a mesh of this process alone on its device, to wrap weights that nobody shares."""
    group = dist.new_group(
        [dist.get_rank()], backend=_backend(device.type), use_local_synchronization=True
    )
    return DeviceMesh.from_group(group, device.type)


def _groups(by_kind: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Make the group of each kind that has several ranks, and that of the first of each."""
    made: dict[str, Any] = {}
    for kind, ranks in by_kind.items():
        made[kind] = None
        if len(ranks) > 1:
            made[kind] = dist.new_group(list(ranks), backend=_backend(kind))
    leaders = [ranks[0] for ranks in by_kind.values()]
    made["leaders"] = dist.new_group(leaders, backend="gloo") if len(leaders) > 1 else None
    return made


def _backend(kind: str) -> str:
    """Name the backend for tensors of a kind, which only the members of the kind need to have."""
    if kind == "cpu":
        return "gloo"
    known = dist.Backend.default_device_backend_map.get(kind)
    return f"cpu:gloo,{kind}:{known or NATIVE.get(kind, kind)}"


NATIVE = {"cuda": "nccl", "npu": "hccl", "xpu": "xccl"}
"""Backends of kinds that this process's torch does not know."""
