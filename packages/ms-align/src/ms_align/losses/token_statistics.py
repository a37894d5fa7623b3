"""Fused losses and entropies from hidden states or logits, computed in cache-sized chunks.

Logits are the largest tensor of an update. Each chunk is read while it is in the CPU cache, the
backward pass overwrites it with its gradient, and the next update reuses the memory: page faults
of fresh memory cost a core half the time of the matmul that fills it. Logits larger than
`SAVED_LOGITS_BYTES` are recomputed in the backward pass instead of saved.
Shapes: N tokens, H hidden, V vocabulary.
"""

import weakref
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_BYTES = 1 << 20
"""Logits processed at a time, so that they stay in a core's L2 cache."""
PRODUCT_BYTES = 1 << 23
"""Logits per matmul, large enough for its full throughput."""
SAVED_LOGITS_BYTES = 1 << 30
"""Upper limit for logits that are saved for the backward pass."""


class Scratch:
    """Memory for logits, reused by consecutive updates."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._borrowed: weakref.ref[Tensor] | None = None

    def borrow(self, like: Tensor, shape: tuple[int, int]) -> Tensor:
        """Return an uninitialized tensor; its memory can be reused once the tensor is deleted.

        Args:
            like: tensor with the dtype and device.
            shape: rows and width.
        """
        if self._borrowed is not None and self._borrowed() is not None:
            return like.new_empty(shape)  # the memory is still in use
        size = shape[0] * shape[1]
        memory = self._memory
        # The buffer grows to the largest request and is replaced if dtype or device change.
        fits = memory is not None and (memory.dtype, memory.device) == (like.dtype, like.device)
        if memory is None or not fits or memory.numel() < size:
            self._memory = memory = like.new_empty(size)
        tensor = memory[:size].view(shape)
        self._borrowed = weakref.ref(tensor)
        return tensor


def projected_losses_and_entropies(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, scratch: Scratch
) -> tuple[Tensor, Tensor]:
    """Compute -log p(target) and the entropy of p = softmax(hidden @ weight.T / temperature).

    Args:
        hidden: (N, H), any float dtype.
        weight: (V, H), same dtype.
        targets: (N,) int64 token ids.
        temperature: above 0.
        scratch: memory for the logits.

    Returns:
        Losses (N,) float32 and entropies (N,) float32 in nats; both are differentiable.
    """
    return cast(
        tuple[Tensor, Tensor],
        _Projected.apply(hidden, weight, targets, temperature, scratch),  # type: ignore[no-untyped-call]
    )


def losses_and_entropies(
    logits: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Compute -log p(target) and the entropy of p = softmax(logits / temperature).

    Args:
        logits: (N, V), any float dtype.
        targets: (N,) int64 token ids.
        temperature: above 0.

    Returns:
        Losses (N,) float32 and entropies (N,) float32 in nats; both are differentiable.
    """
    return cast(
        tuple[Tensor, Tensor],
        _Statistics.apply(logits, targets, temperature),  # type: ignore[no-untyped-call]
    )


class _Projected(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        scratch: Scratch,
    ) -> Any:
        """Compute losses and entropies; save the logits for the backward pass if they fit."""
        count, vocabulary = hidden.shape[0], weight.shape[0]
        needs_grad = any(ctx.needs_input_grad[:2])
        save_logits = (
            needs_grad and count * vocabulary * hidden.element_size() <= SAVED_LOGITS_BYTES
        )
        chunk = min(count, _rows(PRODUCT_BYTES, vocabulary))
        logits = scratch.borrow(hidden, (count if save_logits else chunk, vocabulary))
        statistics = hidden.new_empty(3, count, dtype=torch.float32)  # logsumexp, loss, entropy
        for part in _slices(count, chunk):
            chunk_logits = logits[part] if save_logits else logits[: part.stop - part.start]
            torch.mm(hidden[part], weight.t(), out=chunk_logits)  # (n, V)
            _loss_statistics(chunk_logits, targets[part], temperature, statistics[:, part])
        ctx.save_for_backward(hidden, weight, targets, statistics)
        ctx.temperature, ctx.scratch = temperature, scratch
        ctx.logits = logits if save_logits else None
        ctx.set_materialize_grads(False)
        return statistics[1], statistics[2]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor | None, grad_entropies: Tensor | None) -> Any:
        """Compute the gradients of hidden states and weight; recompute unsaved logits."""
        hidden, weight, targets, statistics = ctx.saved_tensors
        count, vocabulary = hidden.shape[0], weight.shape[0]
        saved, ctx.logits = ctx.logits, None
        chunk = min(count, _rows(PRODUCT_BYTES, vocabulary))
        delta = ctx.scratch.borrow(hidden, (chunk, vocabulary)) if saved is None else saved
        grad_hidden = torch.empty_like(hidden)
        grad_weight = None  # with saved logits it is a single matmul and needs no accumulator
        if saved is None:
            grad_weight = weight.new_zeros(weight.shape, dtype=torch.float32)
        for part in _slices(count, chunk):
            chunk_delta = delta[part] if saved is not None else delta[: part.stop - part.start]
            if saved is None:
                torch.mm(hidden[part], weight.t(), out=chunk_delta)
            grads = [None if g is None else g[part] for g in (grad_losses, grad_entropies)]
            _logits_grad(chunk_delta, targets[part], ctx.temperature, statistics[:, part], *grads)
            torch.mm(chunk_delta, weight, out=grad_hidden[part])  # (n, H)
            if grad_weight is not None:
                grad_weight += chunk_delta.t() @ hidden[part]
        if grad_weight is None:
            # All logit gradients are in `delta` now.
            grad_weight = delta.t() @ hidden
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> Any:
        """Compute losses and entropies; save the logits and their logsumexp."""
        statistics = logits.new_empty(3, logits.shape[0], dtype=torch.float32)
        _loss_statistics(logits, targets, temperature, statistics)
        ctx.save_for_backward(logits, targets, statistics)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return statistics[1], statistics[2]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor | None, grad_entropies: Tensor | None) -> Any:
        """Compute the gradient of the logits."""
        logits, targets, statistics = ctx.saved_tensors
        delta = logits.clone()
        _logits_grad(delta, targets, ctx.temperature, statistics, grad_losses, grad_entropies)
        return delta, None, None


def _loss_statistics(logits: Tensor, targets: Tensor, temperature: float, out: Tensor) -> None:
    """Write logsumexp, loss and entropy of each row of logits (N, V) into `out` (3, N)."""
    for part in _slices(logits.shape[0], _rows(CHUNK_BYTES, logits.shape[1])):
        scores = logits[part].float()
        scores = scores / temperature if temperature != 1.0 else scores
        row_max = scores.amax(1, keepdim=True)
        shifted = scores - row_max  # z - max z, (n, V)
        target_scores = shifted.gather(1, targets[part, None])[:, 0]  # (n,)
        weights = shifted.exp()
        total = weights.sum(1)
        log_total = total.log()  # log of the sum of exp(z - max z)
        out[0, part] = log_total + row_max[:, 0]
        out[1, part] = log_total - target_scores
        # H = log Z - E[z] with z shifted by the row maximum
        out[2, part] = log_total - weights.mul_(shifted).sum(1) / total


def _logits_grad(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    statistics: Tensor,
    grad_losses: Tensor | None,
    grad_entropies: Tensor | None,
) -> None:
    """Overwrite logits (N, V) with their gradient.

    With z = logits / temperature, dloss/dz = p - onehot(target) and dH/dz = -p·(log p + H), each
    times the incoming gradient of its token and divided by the temperature.
    """
    for part in _slices(logits.shape[0], _rows(CHUNK_BYTES, logits.shape[1])):
        scores = logits[part].float()
        scores = scores / temperature if temperature != 1.0 else scores
        logprobs = scores - statistics[0, part, None]  # log p = z - logsumexp(z)
        # In place if log p is not needed again for the entropy's gradient.
        delta = logprobs.exp() if grad_entropies is not None else logprobs.exp_()
        entropy_delta = None
        if grad_entropies is not None:
            scale = grad_entropies[part, None] / temperature
            entropy_delta = logprobs.add_(statistics[2, part, None]).mul_(delta).mul_(scale)
        if grad_losses is None:
            delta.zero_()
        else:
            # p - onehot(target)
            delta.scatter_add_(1, targets[part, None], delta.new_full((len(delta), 1), -1.0))
            delta.mul_(grad_losses[part, None] / temperature)
        logits[part] = delta if entropy_delta is None else delta.sub_(entropy_delta)


def _rows(size_bytes: int, vocabulary: int) -> int:
    return max(1, size_bytes // (4 * vocabulary))


def _slices(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, max(size, 1)):
        yield slice(start, min(start + size, count))
