"""What the last stage gives a loss, and the loss of next-token prediction."""

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional as F

from ms_parallel.cluster.groups import Groups
from ms_parallel.models.batch import Batch
from ms_parallel.operators import plain as plain_ops
from ms_parallel.operators.plain import Ops

__all__ = ["Batch", "HeadOutput", "LogitsOutput", "Loss", "NextTokenLoss", "Output"]

IGNORED = -100
EVERYWHERE = slice(None)
WHOLE_LOGITS_BYTES = 256 * 2**20
"""Logits up to this size are held for the backward; beyond it, computed twice by chunks."""


class Output(Protocol):
    """What a loss may ask of the last stage; the same under every layout."""

    def logits(self, positions: slice = ...) -> Tensor:
        """Logits (B, S, V) of the whole vocabulary, in the model's dtype; of some positions."""

    def token_losses(self, targets: Tensor) -> Tensor:
        """-log p(target), float32 (B, S), 0 where the target is -100. Holds no big logits."""


class Loss(Protocol):
    """A sum over a batch, and what the sum over the whole global batch is divided by."""

    def weight(self, batch: Batch) -> float:
        """This batch's share of the divisor; shares are added up over ranks and microbatches."""

    def __call__(self, output: Output, batch: Batch) -> Tensor:
        """Sum over this microbatch, a float32 scalar that is not divided yet."""


class NextTokenLoss:
    """Mean of -log p(target) over all target tokens of the global batch, by `weights` if given."""

    def weight(self, batch: Batch) -> float:
        """Number of targets that are not -100, or the sum of their weights."""
        counted = batch["targets"] != IGNORED
        weights = batch.get("weights")
        return float(counted.sum() if weights is None else (weights * counted).sum())

    def __call__(self, output: Output, batch: Batch) -> Tensor:
        """Weighted sum of the microbatch's token losses."""
        losses = output.token_losses(batch["targets"])
        weights = batch.get("weights")
        return losses.sum() if weights is None else (losses * weights).sum()


class HeadOutput:
    """The last stage's normalised hidden state and head, from which logits or losses follow.

    Args:
        hidden: (B, S, H); under tensor parallelism this rank's part of the sequence, (B, S/t, H).
        weight: (V, H); under tensor parallelism a DTensor split over the vocabulary.
        ops: the model's operators.
        groups: the layout's processes.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, ops: Ops, groups: Groups) -> None:
        self.ops = ops
        self.groups = groups
        self.split = groups.layout.tensor > 1
        self.weight = weight.to_local() if isinstance(weight, DTensor) else weight
        self.hidden = _gather_sequence(hidden, groups) if self.split else hidden

    def logits(self, positions: slice = EVERYWHERE) -> Tensor:
        """Logits (B, S, V), gathered over the tensor axis; of some positions, or of all."""
        local = F.linear(self.hidden[:, positions], self.weight)
        if not self.split:
            return local
        mesh = self.groups.mesh["tensor"]
        spread = DTensor.from_local(local, mesh, [Shard(2)], run_check=False)
        return spread.redistribute(placements=[Replicate()]).to_local()

    def token_losses(self, targets: Tensor) -> Tensor:
        """-log p(target), float32 (B, S), 0 where the target is -100."""
        if self.split:
            group = self.groups.group("tensor")
            flat = self.hidden.flatten(0, 1)
            losses: Tensor = VocabularyParallelLoss.apply(  # type: ignore[no-untyped-call]
                flat, self.weight, targets.flatten(), group, WHOLE_LOGITS_BYTES
            )
            return losses.view(targets.shape)
        return self.ops.linear_cross_entropy(self.hidden, self.weight, targets, reduction="none")


class LogitsOutput:
    """The logits of a model that has no head apart from it.

    Args:
        whole: logits (B, S, V), the same on every tensor rank.
    """

    def __init__(self, whole: Tensor) -> None:
        self.whole = whole

    def logits(self, positions: slice = EVERYWHERE) -> Tensor:
        """Logits (B, S, V) of some positions, or of all."""
        return self.whole[:, positions]

    def token_losses(self, targets: Tensor) -> Tensor:
        """-log p(target), float32 (B, S), 0 where the target is -100."""
        return plain_ops.cross_entropy(self.whole, targets, reduction="none")


def _gather_sequence(hidden: Tensor, groups: Groups) -> Tensor:
    """All of the sequence on every tensor rank; gradients, each of one vocabulary part, add up."""
    spread = DTensor.from_local(hidden, groups.mesh["tensor"], [Shard(1)], run_check=False)
    return spread.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


class VocabularyParallelLoss(torch.autograd.Function):
    """-log softmax(h·Wᵀ)[target] with W split by rows (the vocabulary) over a process group.

    Works a chunk of tokens at a time. A chunk leaves its local maximum, sum of exponentials and
    target logit, float32; two collectives then settle all chunks at once (Shoeybi et al., 2019,
    section 3, has three per call). The backward forms p - onehot(target) from the saved
    log-normaliser; if all local logits fit `limit_bytes` there is one chunk, and it is kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        group: dist.ProcessGroup,
        limit_bytes: int,
    ) -> Tensor:
        """Losses (T,) float32 of hidden (T, H), weight (V/t, H) and global targets (T,) int64."""
        width = weight.shape[0]
        local = targets - dist.get_rank(group) * width
        here = (local >= 0) & (local < width)
        index = torch.where(here, local, 0)
        rows = _chunk_rows(targets.shape[0], width, limit_bytes)
        kept: Tensor | None = None
        maxima, sums, hits = [], [], []
        for part, at in zip(torch.split(hidden, rows), torch.split(index, rows), strict=True):
            logits = F.linear(part, weight).float()
            maximum = logits.amax(dim=1)
            maxima.append(maximum)
            sums.append((logits - maximum[:, None]).exp().sum(dim=1))
            hits.append(logits.gather(1, at[:, None])[:, 0])
            kept = logits if rows >= targets.shape[0] else None
        normaliser, target_logit = _settle(
            torch.cat(maxima), torch.cat(sums), torch.cat(hits).masked_fill_(~here, 0.0), group
        )
        counted = targets != IGNORED
        ctx.rows = rows
        ctx.save_for_backward(hidden, weight, index, here & counted, counted, normaliser, kept)
        return (normaliser - target_logit).masked_fill(~counted, 0.0)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        """Gradients of hidden (this rank's share of the sum) and of the local weight."""
        hidden, weight, index, here, counted, normaliser, kept = ctx.saved_tensors
        gradient = gradient.masked_fill(~counted, 0.0)
        of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        of_weight = (
            torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        )
        for start in range(0, hidden.shape[0], ctx.rows):
            rows = slice(start, start + ctx.rows)
            logits = F.linear(hidden[rows], weight).float() if kept is None else kept
            error = (logits - normaliser[rows, None]).exp_()
            error.scatter_add_(1, index[rows, None], -here[rows, None].float())
            error = (error * gradient[rows, None]).to(weight.dtype)
            if of_hidden is not None:
                torch.mm(error, weight, out=of_hidden[rows])
            if of_weight is not None:
                of_weight += error.t() @ hidden[rows]
        return (
            of_hidden,
            None if of_weight is None else of_weight.to(weight.dtype),
            None,
            None,
            None,
        )


def _settle(
    maximum: Tensor, total: Tensor, hit: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Log of the sum of exponentials over the group, and the target's logit, each (T,)."""
    highest = maximum.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    sums = torch.stack([total * (maximum - highest).exp(), hit])
    dist.all_reduce(sums, group=group)
    return sums[0].log() + highest, sums[1]


def _chunk_rows(tokens: int, width: int, limit_bytes: int) -> int:
    """Tokens whose float32 logits of `width` fit `limit_bytes`."""
    return max(1, min(tokens, limit_bytes // (4 * width)))
