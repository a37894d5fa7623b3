"""Cross-entropy with a vocabulary-parallel output head."""

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
    """-log softmax(h·Wᵀ)[target] with W split by vocabulary rows over a process group.

    Processes tokens in chunks. Each chunk yields its local maximum, sum of exponentials and target
    logit in float32 (float64 for float64); two collectives then reduce all chunks at once (Shoeybi
    et al., 2019, section 3, use three per call). The backward pass computes p - onehot(target) from
    the saved log-normalizer. If all local logits fit in `limit_bytes`, they are a single chunk,
    which is saved.
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
        """Compute losses (T,) in float32 (float64 for float64).

        Inputs: hidden (T, H), weight (V/t, H) and global targets (T,) int64.

        Raises:
            RuntimeError: a target is out of range and not ignored; on an accelerator, the kernel
                asserts.
        """
        width = weight.shape[0]
        # Row index in the local weight; in range only on the rank with the target.
        local = targets - dist.get_rank(group) * width
        here, counted = (local >= 0) & (local < width), targets != IGNORED
        # As on one process, an out-of-range target fails in the gather, here on every rank.
        invalid = counted & ((targets < 0) | (targets >= width * dist.get_world_size(group)))
        index = torch.where(here, local, 0).where(~invalid, targets)
        rows = _chunk_rows(targets.shape[0], width, limit_bytes)
        saved_logits: Tensor | None = None
        maxima, sums, hits = [], [], []
        for part, classes in zip(torch.split(hidden, rows), torch.split(index, rows), strict=True):
            logits = widen(F.linear(part, weight))
            logits = logits if softcap is None else capped(logits, softcap)
            maximum = logits.amax(dim=1)
            maxima.append(maximum)
            sums.append((logits - maximum[:, None]).exp().sum(dim=1))
            # On other ranks any index does, since their value is masked below.
            hits.append(logits.gather(1, classes[:, None])[:, 0])
            # Saved if they are the only chunk.
            saved_logits = logits if rows >= targets.shape[0] else None
        normalizer, target_logit = _reduce_over_group(
            torch.cat(maxima), torch.cat(sums), torch.cat(hits).masked_fill_(~here, 0.0), group
        )
        ctx.rows, ctx.softcap, ctx.z_loss = rows, softcap, z_loss
        ctx.save_for_backward(
            hidden, weight, index, here & counted, counted, normalizer, saved_logits
        )
        losses = normalizer - target_logit
        if z_loss:
            losses = losses + z_loss * normalizer.square()
        return losses.masked_fill(~counted, 0.0)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None, None]:
        """Compute the gradients of hidden (this rank's partial sum) and of the local weight."""
        hidden, weight, index, here, counted, normalizer, saved_logits = ctx.saved_tensors
        scale = gradient.masked_fill(~counted, 0.0)
        needs_grad = ctx.needs_input_grad[:2]
        grad_hidden, grad_weight = head_gradients(
            hidden,
            weight,
            index,
            here,
            scale,
            normalizer,
            ctx.rows,
            logits=saved_logits,
            softcap=ctx.softcap,
            z_loss=ctx.z_loss,
            needs_grad_of=needs_grad,
        )
        return grad_hidden, grad_weight, None, None, None, None, None


def _reduce_over_group(
    maximum: Tensor, total: Tensor, hit: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Reduce logsumexp and target logit over the group, both (T,)."""
    highest = maximum.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    # Rescaled to the global maximum before the sum; both sums share one message.
    sums = torch.stack([total * (maximum - highest).exp(), hit])
    dist.all_reduce(sums, group=group)
    return sums[0].log() + highest, sums[1]


def _chunk_rows(tokens: int, width: int, limit_bytes: int) -> int:
    """Tokens per chunk whose float32 logits of `width` fit in `limit_bytes`; at least one."""
    return max(1, min(tokens, limit_bytes // (4 * width)))
