"""The processes of a layout: one device mesh with an axis for each way of splitting."""

import torch
import torch.distributed as dist
from attrs import frozen
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ms_parallel.cluster.layout import AXES, Layout, Place, row_axes, token_axes
from ms_parallel.cluster.mixed.devices import Devices
from ms_parallel.cluster.mixed.kinds import HOST, KindGroups, alone_on, meet_kinds
from ms_parallel.torch_private import unflatten_mesh


@frozen(kw_only=True)
class Channel:
    """A way to one other process."""

    rank: int
    """Its global rank."""
    group: dist.ProcessGroup
    wire: torch.device
    """Where a message lies that the group takes."""


@frozen(kw_only=True)
class Groups:
    """One process's place among all, and the process groups along each axis."""

    layout: Layout
    place: Place
    device: torch.device
    mesh: DeviceMesh
    """An axis for each of the layout's that has ranks, outermost first."""
    rows: DeviceMesh
    """The processes that read different rows of a batch, all else as here."""
    tokens: DeviceMesh
    """The processes that hold different tokens of a batch, all else as here: they add up
    gradients."""
    replicas: DeviceMesh | None
    """The part of `tokens` that holds the same parts of weights; None where there are none."""
    shards: DeviceMesh
    """The part of `tokens` that shards weights among its processes."""
    experts: DeviceMesh | None
    """The part of `shards` that shares out experts; None where each process has all."""
    expert_shards: DeviceMesh
    """The part of `shards` that has the same experts and shards them among its processes."""
    devices: Devices | None = None
    """Devices of all processes, where they are of several kinds."""
    kinds: KindGroups | None = None
    """How sums over processes that hold the same weights travel between kinds of devices."""

    @property
    def wire(self) -> torch.device:
        """Where exchanged tensors lie: on the device, or in memory where kinds are mixed."""
        return self.device if self.kinds is None else HOST

    @property
    def token_rank(self) -> int:
        """Which of the processes that hold different tokens this one is."""
        return self.tokens.get_local_rank()

    @property
    def is_first_replica(self) -> bool:
        """Whether no earlier process holds the same parts of weights because of `replicate`."""
        return self.replicas is None or self.replicas.get_local_rank() == 0

    def group(self, axis: str) -> dist.ProcessGroup:
        """Get the processes that differ from this one along `axis`, or a mesh of the fields above.

        Those that share its `stage` are asked for by all processes at once the first time.
        """
        if axis == "stage":
            others = tuple(axis for axis in AXES if axis != "pipeline")
            return self.mesh[others]._flatten("stage").get_group()
        joined = {"rows": self.rows, "tokens": self.tokens, "shards": self.shards}
        joined |= {} if self.replicas is None else {"replicas": self.replicas}
        return joined[axis].get_group() if axis in joined else self.mesh.get_group(axis)

    def peer(self, axis: str, index: int) -> int:
        """Return the global rank of the process at `index` along `axis`, all other axes as here."""
        return dist.get_global_rank(self.group(axis), index)

    def link(self, peer: int) -> Channel:
        """Return how messages travel to pipeline rank `peer`."""
        rank = self.peer("pipeline", peer)
        if self.kinds is None:
            return Channel(rank=rank, group=self.group("pipeline"), wire=self.device)
        assert self.devices is not None
        if self.kinds.line is not None and self.devices.kinds[rank] == self.device.type:
            return Channel(rank=rank, group=self.kinds.line, wire=self.device)
        return Channel(rank=rank, group=self.group("pipeline"), wire=HOST)

    def all_reduce(
        self,
        tensor: torch.Tensor,
        axis: str | None = None,
        op: dist.ReduceOp.RedOpType | None = None,
    ) -> torch.Tensor:
        """Sum (or `op`) `tensor` in place along what `group` knows, or over all processes."""
        op = op or dist.ReduceOp.SUM
        if self.kinds is not None and axis in ("replicas", "rows", "tokens"):
            return self.kinds.all_reduce(tensor, op)
        group = None if axis is None else self.group(axis)
        if dist.get_world_size(group) > 1:
            sent = tensor.to(self.wire)
            dist.all_reduce(sent, op=op, group=group)
            if sent is not tensor:
                tensor.copy_(sent)
        return tensor


def lay_mesh(layout: Layout, device: torch.device, devices: Devices | None = None) -> Groups:
    """Lay the mesh of a layout over the processes that have met.

    Args:
        layout: how they split the work.
        device: of this process.
        devices: of all, where they are not all of one kind.

    Raises:
        LayoutError: devices of several kinds cannot split it so.
    """
    mixed = devices is not None and devices.are_mixed
    shape = tuple(getattr(layout, axis) for axis in AXES)
    mesh = init_device_mesh(HOST.type if mixed else device.type, shape, mesh_dim_names=AXES)
    tokens = _joined("tokens", token_axes(), mesh, layout)
    replicas, shards = None, tokens
    if layout.replicate > 1:
        sizes = (layout.replicate, layout.shards)
        replicas, shards = unflatten_mesh(tokens, sizes, ("replicas", "shards"))
    if mixed:
        shards = alone_on(device)
    expert_shards, experts = shards, None
    if layout.expert > 1:
        sizes = (layout.expert_shards, layout.expert)
        expert_shards, experts = unflatten_mesh(shards, sizes, ("expert_shards", "expert"))
    return Groups(
        layout=layout,
        place=layout.place(dist.get_rank()),
        device=device,
        mesh=mesh,
        rows=_joined("rows", row_axes(), mesh, layout),
        tokens=tokens,
        replicas=replicas,
        shards=shards,
        experts=experts,
        expert_shards=expert_shards,
        devices=devices,
        kinds=meet_kinds(layout, devices, device) if devices and mixed else None,
    )


def _joined(name: str, axes: tuple[str, ...], mesh: DeviceMesh, layout: Layout) -> DeviceMesh:
    """Join some axes to the mesh of all processes along them."""
    split = tuple(axis for axis in axes if getattr(layout, axis) > 1) or axes[:1]
    return mesh[split[0]] if len(split) == 1 else mesh[split]._flatten(name)
