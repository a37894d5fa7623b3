"""Point-to-point messages between pipeline ranks: batched, and waited for only when needed."""

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ms_parallel.cluster.groups import Groups
from ms_parallel.cluster.watch import position
from ms_parallel.errors import ConfigError

Name = tuple[int, int, str]
"""(stage, microbatch, "F" or "B"): the sending stage and the direction of the message."""
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
    """Sends and receives in the order of the calls.

    Consecutive requests are posted as one batch. Before the first message of each kind, a small
    header transfers its dtype and shape; later ones use the cached shape.
    """

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self.shapes: dict[Shape, tuple[torch.dtype, tuple[int, ...]]] = {}
        self.queue: list[tuple[Name, dist.P2POp]] = []
        self.sender: dict[Name, int] = {}
        """Global rank of the sender of each pending message."""
        self.received: dict[Name, tuple[Tensor, Sequence[dist.Work]]] = {}
        self.sent: deque[tuple[Name, Tensor, Sequence[dist.Work]]] = deque()

    def send(self, name: Name, tensor: Tensor, peer: int, shape_key: Shape) -> None:
        """Queue the message `name` for pipeline rank `peer`; `shape_key` identifies its shape."""
        device = self.groups.link(peer).message_device
        tensor = tensor.contiguous().to(device)
        # The receiver needs dtype and shape before it can allocate a buffer.
        if shape_key not in self.shapes:
            self.shapes[shape_key] = (tensor.dtype, tuple(tensor.shape))
            self.flush()
            self._queue(name, dist.isend, _describe(tensor, device), peer)
            self.flush()
        self._queue(name, dist.isend, tensor, peer)

    def receive(self, name: Name, peer: int, shape_key: Shape) -> None:
        """Queue the receive of the message `name` from pipeline rank `peer`."""
        device = self.groups.link(peer).message_device
        # Waits for the header, once per shape.
        if shape_key not in self.shapes:
            self.flush()
            header = torch.zeros(MAX_DIMS + 2, dtype=torch.int64, device=device)
            self.sender[name] = self._queue(name, dist.irecv, header, peer)
            self.shapes[shape_key] = _read(self.take(name))
        dtype, shape = self.shapes[shape_key]
        tensor = torch.empty(shape, dtype=dtype, device=device)
        self.sender[name] = self._queue(name, dist.irecv, tensor, peer)

    def take(self, name: Name) -> Tensor:
        """Wait for a message that was queued by `receive`, and return it."""
        self.flush()
        tensor, works = self.received.pop(name)
        position.message = name, self.sender.pop(name)
        for work in works:
            work.wait()
        position.message = None
        return tensor.to(self.groups.device)

    def flush(self) -> None:
        """Post all queued sends and receives as one batch; drop buffers of completed sends.

        Messages complete in order. Gloo never reports completion before a wait, so checking more
        than the first pending send would cost time for every send of a step.
        """
        while self.sent and all(work.is_completed() for work in self.sent[0][2]):
            self.sent.popleft()
        if not self.queue:
            return
        queue, self.queue = self.queue, []
        groups = list({id(operation.group): operation.group for _, operation in queue}.values())
        for group in groups:  # several with mixed device types
            self._post([entry for entry in queue if entry[1].group is group])

    def _post(self, queue: Sequence[tuple[Name, dist.P2POp]]) -> None:
        """Post the messages of one group."""
        works = dist.batch_isend_irecv([operation for _, operation in queue])
        # One work per message (gloo), or one for the whole batch (NCCL, HCCL).
        works_by_message = (
            [[work] for work in works] if len(works) == len(queue) else [works] * len(queue)
        )
        for (name, operation), message_works in zip(queue, works_by_message, strict=True):
            if operation.op is dist.isend:
                # Keeps the tensor alive until the send has completed.
                self.sent.append((name, operation.tensor, message_works))
            else:
                self.received[name] = (operation.tensor, message_works)

    def wait_for_sends(self, name: Name | None = None) -> None:
        """Wait until the buffer of the message `name`, or of all messages, may be overwritten."""
        self.flush()
        for sent, _, works in self.sent:
            if name in (None, sent):
                for work in works:
                    work.wait()
        self.sent = deque(entry for entry in self.sent if name not in (None, entry[0]))

    def discard(self) -> None:
        """Drop all pending messages, after an error."""
        self.queue, self.received, self.sent, self.sender = [], {}, deque(), {}

    def broadcast(self, tensor: Tensor | None, owner: int) -> Tensor:
        """Broadcast `tensor` from pipeline rank `owner` (None on others) to all pipeline ranks."""
        if self.groups.layout.pipeline == 1:
            assert tensor is not None
            return tensor
        # dtype and shape first, as other ranks cannot know them.
        source, group = self.groups.peer("pipeline", owner), self.groups.group("pipeline")
        header = torch.zeros(MAX_DIMS + 2, dtype=torch.int64, device=self.groups.message_device)
        if tensor is not None:
            header = _describe(tensor, self.groups.message_device)
        dist.broadcast(header, source, group=group)
        dtype, shape = _read(header)
        if tensor is None:
            tensor = torch.empty(shape, dtype=dtype, device=self.groups.message_device)
        # A CPU tensor would be sent over another backend than the receivers use.
        tensor = tensor.to(self.groups.message_device).contiguous()
        dist.broadcast(tensor, source, group=group)
        return tensor.to(self.groups.device)

    def _queue(self, name: Name, operation: object, tensor: Tensor, peer: int) -> int:
        """Queue an operation with pipeline rank `peer`; return the peer's global rank."""
        link = self.groups.link(peer)
        message = dist.P2POp(operation, tensor, link.rank, link.group)  # type: ignore[arg-type]
        self.queue.append((name, message))
        return link.rank


def _describe(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.dtype not in DTYPES or tensor.dim() > MAX_DIMS:
        raise ConfigError(
            f"cannot send {tensor.dim()} dims of {tensor.dtype} between stages; stages must return"
            f" at most {MAX_DIMS} dims of one of {', '.join(map(str, DTYPES))}"
        )
    # Header: index of the dtype, number of dims, the dims, and zeros.
    fields = [DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    return torch.tensor(fields + [0] * (MAX_DIMS + 2 - len(fields)), device=device)


def _read(header: Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    dtype, dims, *shape = header.tolist()
    return DTYPES[dtype], tuple(shape[:dims])
