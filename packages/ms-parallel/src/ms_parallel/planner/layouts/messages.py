"""Counts the collectives of an engine's step in a fake process group."""

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
    """Size in bytes, as for `collective_s`."""
    ranks: int
    stride: int
    """Distance between consecutive ranks, in devices."""


COLLECTIVES: Final[Mapping[str, tuple[Collective, int, bool]]] = {
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
"""Collective of each torch operator, the argument with the tensor, and whether that is one rank's
part. A broadcast takes the time of an all-gather of the same size."""


class MessageLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context manager that counts the collectives of this process."""

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
        """Count an operator if it is a collective, and run it."""
        collective = COLLECTIVES.get(str(func).rpartition(".")[0])
        if collective is not None:
            self._count(args, *collective)
        return func(*args, **(kwargs or {}))

    def _count(
        self, args: Sequence[Any], collective: Collective, argument: int, is_part: bool
    ) -> None:
        group = _group(args)
        if len(group) == 1:
            return
        size = _bytes(args[argument]) * (len(group) if is_part else 1)
        # The ranks of a group are equally spaced.
        message = Message(collective, size, len(group), max(1, group[1] - group[0]))
        self.messages[message] += 1


def seconds(messages: Mapping[Message, int], cluster: Cluster) -> float:
    """Total time of all messages on a cluster, one after the other."""
    return sum(
        count
        * collective_s(cluster, message.kind, message.size_bytes, message.ranks, message.stride)
        for message, count in messages.items()
    )


def _bytes(value: Any) -> int:
    """Size of a tensor, or of all tensors in a list."""
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(_bytes, value)) if isinstance(value, list | tuple) else 0


def _group(args: Sequence[Any]) -> list[int]:
    """Global ranks of the group that is passed to an operator or named by it."""
    # c10d operators take the group as an argument; functional ones take its name last.
    for argument in args[1:]:
        if isinstance(argument, torch.ScriptObject):
            return dist.get_process_group_ranks(dist.ProcessGroup.unbox(argument))
    names: list[Any] = [argument for argument in args if isinstance(argument, str)]
    return dist.get_process_group_ranks(_resolve_process_group(names[-1]))
