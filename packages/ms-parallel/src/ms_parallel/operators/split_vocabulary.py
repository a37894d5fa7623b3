"""Cross-entropy of a head whose rows, the vocabulary, are split over processes."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ms_parallel.operators.cpu import widen
from ms_parallel.operators.losses import capped, head_gradients

IGNORED = -100


class VocabularyParallelLoss(torch.autograd.Function):
    """-log softmax(h·Wᵀ)[target] with W split by rows (the vocabulary) over a process group.

    Works a chunk of tokens at a time. A chunk leaves its local maximum, sum of exponentials and
    target logit, float32 (float64 for float64); two collectives then settle all chunks at once
    (Shoeybi et al., 2019, section 3, has three per call). The backward forms p - onehot(target)
    from the saved log-normaliser; if all local logits fit `limit_bytes` there is one chunk, and it
    is kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        group: dist.ProcessGroup,
        limit_bytes: int,
        softcap: float | None = None,
        z_loss: float = 0.0,
    ) -> Tensor:
        """Compute losses (T,) float32, float64 for float64.

        They are those of hidden (T, H), weight (V/t, H) and global targets (T,) int64.

        Raises:
            RuntimeError: a target is neither a class nor ignored; an accelerator stops at it.
        """
        width = weight.shape[0]
        local = targets - dist.get_rank(group) * width
        here, counted = (local >= 0) & (local < width), targets != IGNORED
        # As in one process, a target that is no class fails in the lookup: on every rank alike.
        foreign = counted & ((targets < 0) | (targets >= width * dist.get_world_size(group)))
        index = torch.where(here, local, 0).where(~foreign, targets)
        rows = _chunk_rows(targets.shape[0], width, limit_bytes)
        kept: Tensor | None = None
        maxima, sums, hits = [], [], []
        for part, at in zip(torch.split(hidden, rows), torch.split(index, rows), strict=True):
            logits = widen(F.linear(part, weight))
            logits = logits if softcap is None else capped(logits, softcap)
            maximum = logits.amax(dim=1)
            maxima.append(maximum)
            sums.append((logits - maximum[:, None]).exp().sum(dim=1))
            hits.append(logits.gather(1, at[:, None])[:, 0])
            kept = logits if rows >= targets.shape[0] else None
        normaliser, target_logit = _settle(
            torch.cat(maxima), torch.cat(sums), torch.cat(hits).masked_fill_(~here, 0.0), group
        )
        ctx.rows, ctx.softcap, ctx.z_loss = rows, softcap, z_loss
        ctx.save_for_backward(hidden, weight, index, here & counted, counted, normaliser, kept)
        losses = normaliser - target_logit
        if z_loss:
            losses = losses + z_loss * normaliser.square()
        return losses.masked_fill(~counted, 0.0)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None, None]:
        """Compute gradients of hidden (this rank's share of the sum) and of the local weight."""
        hidden, weight, index, here, counted, normaliser, kept = ctx.saved_tensors
        scale = gradient.masked_fill(~counted, 0.0)
        wanted = ctx.needs_input_grad[:2]
        of_hidden, of_weight = head_gradients(
            hidden,
            weight,
            index,
            here,
            scale,
            normaliser,
            ctx.rows,
            logits=kept,
            softcap=ctx.softcap,
            z_loss=ctx.z_loss,
            wanted=wanted,
        )
        return of_hidden, of_weight, None, None, None, None, None


def _settle(
    maximum: Tensor, total: Tensor, hit: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Compute the group's log of the sum of exponentials, and the target's logit, each (T,)."""
    highest = maximum.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    sums = torch.stack([total * (maximum - highest).exp(), hit])
    dist.all_reduce(sums, group=group)
    return sums[0].log() + highest, sums[1]


def _chunk_rows(tokens: int, width: int, limit_bytes: int) -> int:
    """Count the tokens whose float32 logits of `width` fit `limit_bytes`; at least one."""
    return max(1, min(tokens, limit_bytes // (4 * width)))
