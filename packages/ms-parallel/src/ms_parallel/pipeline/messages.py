"""Point-to-point messages between pipeline ranks: batched, waited for only when needed."""

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ms_parallel.cluster.groups import Groups
from ms_parallel.cluster.watch import position
from ms_parallel.errors import ConfigError

Name = tuple[int, int, str]
"""(stage, microbatch, `F` or `B`): of the stage that sends, or of the one that receives."""
Shape = tuple[int, ...]

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
MAX_DIMS = 6


class Mailbox:
    """Sends and receives in the order in which they are asked for.

    Neighbouring requests leave as one batch. A small message goes before the first of each kind
    and gives its shape; from then on both ends know it.
    """

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self.shapes: dict[Shape, tuple[torch.dtype, tuple[int, ...]]] = {}
        self.queue: list[tuple[Name, dist.P2POp]] = []
        self.sender: dict[Name, int] = {}
        """Global rank that a message comes from, until it is taken."""
        self.received: dict[Name, tuple[Tensor, Sequence[dist.Work]]] = {}
        self.sent: deque[tuple[Name, Tensor, Sequence[dist.Work]]] = deque()

    def send(self, name: Name, tensor: Tensor, peer: int, kind: Shape) -> None:
        """Queue the message `name` for pipeline rank `peer`; `kind` is what decides its shape."""
        wire = self.groups.link(peer).wire
        tensor = tensor.contiguous().to(wire)
        if kind not in self.shapes:
            self.shapes[kind] = (tensor.dtype, tuple(tensor.shape))
            self.flush()
            self._queue(name, dist.isend, _describe(tensor, wire), peer)
            self.flush()
        self._queue(name, dist.isend, tensor, peer)

    def receive(self, name: Name, peer: int, kind: Shape) -> None:
        """Queue the arrival of the message `name` from pipeline rank `peer`."""
        wire = self.groups.link(peer).wire
        if kind not in self.shapes:
            self.flush()
            header = torch.zeros(MAX_DIMS + 2, dtype=torch.int64, device=wire)
            self.sender[name] = self._queue(name, dist.irecv, header, peer)
            self.shapes[kind] = _read(self.take(name))
        dtype, shape = self.shapes[kind]
        tensor = torch.empty(shape, dtype=dtype, device=wire)
        self.sender[name] = self._queue(name, dist.irecv, tensor, peer)

    def take(self, name: Name) -> Tensor:
        """Wait for a message that `receive` queued, and return it."""
        self.flush()
        tensor, works = self.received.pop(name)
        position.message = name, self.sender.pop(name)
        for work in works:
            work.wait()
        position.message = None
        return tensor.to(self.groups.device)

    def flush(self) -> None:
        """Let all queued messages leave as one batch, and release what has been sent.

        Messages are done in their order. Gloo says so of none before it is waited for, so looking
        further than the first one that is not would take time for each that a step has sent.
        """
        while self.sent and all(work.is_completed() for work in self.sent[0][2]):
            self.sent.popleft()
        if not self.queue:
            return
        queue, self.queue = self.queue, []
        groups = list({id(operation.group): operation.group for _, operation in queue}.values())
        for group in groups:  # several where devices are of several kinds
            self._leave([each for each in queue if each[1].group is group])

    def _leave(self, queue: Sequence[tuple[Name, dist.P2POp]]) -> None:
        """Let messages of one group leave."""
        works = dist.batch_isend_irecv([operation for _, operation in queue])
        # One work a message (gloo), or one for the whole batch (NCCL, HCCL).
        each = [[work] for work in works] if len(works) == len(queue) else [works] * len(queue)
        for (name, operation), done in zip(queue, each, strict=True):
            if operation.op is dist.isend:
                self.sent.append((name, operation.tensor, done))
            else:
                self.received[name] = (operation.tensor, done)

    def wait_for_sends(self, name: Name | None = None) -> None:
        """Wait until the message `name`, by default each one, may be overwritten."""
        self.flush()
        for sent, _, works in self.sent:
            if name in (None, sent):
                for work in works:
                    work.wait()
        self.sent = deque(entry for entry in self.sent if name not in (None, entry[0]))

    def forget(self) -> None:
        """Drop everything under way, after an error."""
        self.queue, self.received, self.sent, self.sender = [], {}, deque(), {}

    def share(self, tensor: Tensor | None, owner: int) -> Tensor:
        """Give `tensor` of pipeline rank `owner` (None elsewhere) to every pipeline rank."""
        if self.groups.layout.pipeline == 1:
            assert tensor is not None
            return tensor
        source, group = self.groups.peer("pipeline", owner), self.groups.group("pipeline")
        header = torch.zeros(MAX_DIMS + 2, dtype=torch.int64, device=self.groups.wire)
        if tensor is not None:
            header = _describe(tensor, self.groups.wire)
        dist.broadcast(header, source, group=group)
        dtype, shape = _read(header)
        if tensor is None:
            tensor = torch.empty(shape, dtype=dtype, device=self.groups.wire)
        # One that lies on the CPU would leave over another group than the others listen to.
        tensor = tensor.to(self.groups.wire).contiguous()
        dist.broadcast(tensor, source, group=group)
        return tensor.to(self.groups.device)

    def _queue(self, name: Name, operation: object, tensor: Tensor, peer: int) -> int:
        """Queue an operation with pipeline rank `peer`, and return its global rank."""
        link = self.groups.link(peer)
        message = dist.P2POp(operation, tensor, link.rank, link.group)  # type: ignore[arg-type]
        self.queue.append((name, message))
        return link.rank


def _describe(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.dtype not in DTYPES or tensor.dim() > MAX_DIMS:
        raise ConfigError(
            f"no message is made of {tensor.dim()} dims of {tensor.dtype}; return at most "
            f"{MAX_DIMS} dims of one of {', '.join(map(str, DTYPES))}"
        )
    facts = [DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    return torch.tensor(facts + [0] * (MAX_DIMS + 2 - len(facts)), device=device)


def _read(header: Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    dtype, dims, *shape = header.tolist()
    return DTYPES[dtype], tuple(shape[:dims])
