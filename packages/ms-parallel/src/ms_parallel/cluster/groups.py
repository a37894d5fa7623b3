"""Process groups of a layout: a device mesh with one axis per kind of parallelism."""

import torch
import torch.distributed as dist
from attrs import frozen
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ms_parallel.cluster.layout import AXES, Layout, Place, row_axes, token_axes
from ms_parallel.cluster.mixed.devices import Devices
from ms_parallel.cluster.mixed.kinds import (
    HOST,
    KindGroups,
    create_kind_groups,
    single_process_mesh,
)
from ms_parallel.torch_private import unflatten_mesh


@frozen(kw_only=True)
class Channel:
    """Connection to another process."""

    rank: int
    """Global rank of the peer."""
    group: dist.ProcessGroup
    message_device: torch.device
    """Device that messages of the group must be on."""


@frozen(kw_only=True)
class Groups:
    """This process's coordinates, and its process groups along each axis."""

    layout: Layout
    place: Place
    device: torch.device
    mesh: DeviceMesh
    """Mesh of all processes, with the layout's axes that have ranks, outermost first."""
    rows: DeviceMesh
    """Processes that read different rows of a batch, with all other coordinates equal."""
    tokens: DeviceMesh
    """Processes with different tokens of a batch, over which gradients are reduced."""
    replicas: DeviceMesh | None
    """Part of `tokens` with the same shards of the weights; None without `replicate`."""
    shards: DeviceMesh
    """Part of `tokens` over which weights are sharded."""
    experts: DeviceMesh | None
    """Part of `shards` with different experts; None without expert parallelism."""
    expert_shards: DeviceMesh
    """Part of `shards` with the same experts, which are sharded over it."""
    devices: Devices | None = None
    """Devices of all processes, if they are of several kinds."""
    kinds: KindGroups | None = None
    """Groups for reductions between kinds of devices, over processes with the same weights."""

    @property
    def message_device(self) -> torch.device:
        """Device of exchanged tensors: this process's, or the CPU with mixed kinds."""
        return self.device if self.kinds is None else HOST

    @property
    def token_rank(self) -> int:
        """Index of this process among those with different tokens."""
        return self.tokens.get_local_rank()

    @property
    def is_first_replica(self) -> bool:
        """Whether this process is in the first group of `replicate`."""
        return self.replicas is None or self.replicas.get_local_rank() == 0

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return the group along `axis`, or over the mesh field of that name.

        The first request for the group of a `stage` is collective over all processes.
        """
        if axis == "stage":
            # A stage is all axes but the pipeline.
            other_axes = tuple(axis for axis in AXES if axis != "pipeline")
            return self.mesh[other_axes]._flatten("stage").get_group()
        joined_meshes = {"rows": self.rows, "tokens": self.tokens, "shards": self.shards}
        joined_meshes["expert_shards"] = self.expert_shards
        joined_meshes |= {} if self.replicas is None else {"replicas": self.replicas}
        return (
            joined_meshes[axis].get_group() if axis in joined_meshes else self.mesh.get_group(axis)
        )

    def peer(self, axis: str, index: int) -> int:
        """Global rank of the process at `index` along `axis`, with all other coordinates equal."""
        return dist.get_global_rank(self.group(axis), index)

    def link(self, peer: int) -> Channel:
        """Return the channel to pipeline rank `peer`."""
        rank = self.peer("pipeline", peer)
        if self.kinds is None:
            return Channel(rank=rank, group=self.group("pipeline"), message_device=self.device)
        assert self.devices is not None
        # Native messages within a kind, messages through host memory between kinds.
        if self.kinds.pipeline_group is not None and self.devices.kinds[rank] == self.device.type:
            return Channel(rank=rank, group=self.kinds.pipeline_group, message_device=self.device)
        return Channel(rank=rank, group=self.group("pipeline"), message_device=HOST)

    def all_reduce(
        self,
        tensor: torch.Tensor,
        axis: str | None = None,
        op: dist.ReduceOp.RedOpType | None = None,
    ) -> torch.Tensor:
        """Reduce `tensor` in place along an axis that `group` knows, or over all processes."""
        op = op or dist.ReduceOp.SUM
        if self.kinds is not None and axis in ("replicas", "rows", "tokens"):
            return self.kinds.all_reduce(tensor, op)
        group = None if axis is None else self.group(axis)
        if dist.get_world_size(group) > 1:
            # A copy only with mixed kinds, where the wire is the CPU.
            buffer = tensor.to(self.message_device)
            dist.all_reduce(buffer, op=op, group=group)
            if buffer is not tensor:
                tensor.copy_(buffer)
        return tensor


def create_groups(layout: Layout, device: torch.device, devices: Devices | None = None) -> Groups:
    """Create the process groups of a layout.

    Args:
        layout: layout of the processes.
        device: device of this process.
        devices: devices of all processes, if they are of several kinds.

    Raises:
        LayoutError: mixed kinds of devices do not support this layout.
    """
    mixed = devices is not None and devices.are_mixed
    shape = tuple(getattr(layout, axis) for axis in AXES)
    # With mixed kinds the mesh uses gloo on the CPU; native groups are created separately.
    mesh = init_device_mesh(HOST.type if mixed else device.type, shape, mesh_dim_names=AXES)
    tokens = _join_axes("tokens", token_axes(), mesh, layout)
    replicas, shards = None, tokens
    if layout.replicate > 1:
        # Replicas are the outer dim, so that the shards of a replica are neighbors.
        sizes = (layout.replicate, layout.shards)
        replicas, shards = unflatten_mesh(tokens, sizes, ("replicas", "shards"))
    if mixed:
        # Mixed kinds do not shard weights, see `check_mixed`.
        shards = single_process_mesh(device)
    expert_shards, experts = shards, None
    if layout.expert > 1:
        # Ranks with different experts are neighbors, as they exchange tokens in every layer.
        sizes = (layout.expert_shards, layout.expert)
        expert_shards, experts = unflatten_mesh(shards, sizes, ("expert_shards", "expert"))
    return Groups(
        layout=layout,
        place=layout.place(dist.get_rank()),
        device=device,
        mesh=mesh,
        rows=_join_axes("rows", row_axes(), mesh, layout),
        tokens=tokens,
        replicas=replicas,
        shards=shards,
        experts=experts,
        expert_shards=expert_shards,
        devices=devices,
        kinds=create_kind_groups(layout, devices, device) if devices and mixed else None,
    )


def _join_axes(name: str, axes: tuple[str, ...], mesh: DeviceMesh, layout: Layout) -> DeviceMesh:
    """Flatten some axes of the mesh into one."""
    # Axes of size 1 add nothing; if all have size 1, any of them will do.
    split = tuple(axis for axis in axes if getattr(layout, axis) > 1) or axes[:1]
    return mesh[split[0]] if len(split) == 1 else mesh[split]._flatten(name)
