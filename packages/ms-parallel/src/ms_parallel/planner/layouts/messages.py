"""Counts the collectives that a step of an engine asks for, where they send nothing."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]  # it is private
    _resolve_process_group,
)

from ms_parallel.planner.cluster import Cluster
from ms_parallel.planner.roofline.collectives import Collective, collective_s
from ms_parallel.torch_private import TorchDispatchMode


@frozen
class Message:
    """A collective, or a message to a neighbor."""

    kind: Collective
    size_bytes: int
    """As `collective_s` takes it."""
    ranks: int
    stride: int
    """Devices from one rank to the next."""


KINDS: Final[Mapping[str, tuple[Collective, int, bool]]] = {
    "c10d.allreduce_": ("all_reduce", 0, False),
    "c10d.broadcast_": ("all_gather", 0, False),
    "c10d._allgather_base_": ("all_gather", 0, False),
    "c10d.allgather_": ("all_gather", 0, False),
    "c10d._reduce_scatter_base_": ("reduce_scatter", 1, False),
    "c10d.reduce_scatter_": ("reduce_scatter", 1, False),
    "c10d.alltoall_base_": ("all_to_all", 1, False),
    "c10d.alltoall_": ("all_to_all", 1, False),
    "c10d.send": ("send", 0, False),
    "_c10d_functional.all_reduce": ("all_reduce", 0, False),
    "_c10d_functional.all_reduce_": ("all_reduce", 0, False),
    "_c10d_functional.broadcast": ("all_gather", 0, False),
    "_c10d_functional.all_gather_into_tensor": ("all_gather", 0, True),
    "_c10d_functional.reduce_scatter_tensor": ("reduce_scatter", 0, False),
    "_c10d_functional.all_to_all_single": ("all_to_all", 0, False),
}
"""What torch's operators are, which argument has what travels, and whether it is one rank's part of
it. A ring of broadcasts takes what a gather takes."""


class MessageLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, each collective of this process is counted."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.messages: Counter[Message] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Count an operator if it is a collective, and perform it."""
        known = KINDS.get(str(func).rpartition(".")[0])
        if known is not None:
            self._count(args, *known)
        return func(*args, **(kwargs or {}))

    def _count(self, args: Sequence[Any], kind: Collective, place: int, part: bool) -> None:
        group = _group(args)
        if len(group) == 1:
            return
        size = _bytes(args[place]) * (len(group) if part else 1)
        one = Message(kind, size, len(group), max(1, group[1] - group[0]))
        self.messages[one] += 1


def seconds(messages: Mapping[Message, int], cluster: Cluster) -> float:
    """Add up what all messages take on a cluster, one after the other."""
    return sum(
        count * collective_s(cluster, one.kind, one.size_bytes, one.ranks, one.stride)
        for one, count in messages.items()
    )


def _bytes(value: Any) -> int:
    """Return the size of a tensor, or of all in a list."""
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(_bytes, value)) if isinstance(value, list | tuple) else 0


def _group(args: Sequence[Any]) -> list[int]:
    """Return the global ranks of the group that an operator was given or names."""
    for each in args[1:]:
        if isinstance(each, torch.ScriptObject):
            return dist.get_process_group_ranks(dist.ProcessGroup.unbox(each))
    names: list[Any] = [each for each in args if isinstance(each, str)]
    return dist.get_process_group_ranks(_resolve_process_group(names[-1]))
