"""Losses and entropies of many tokens from hidden states or logits, a cacheful at a time.

Logits are the largest tensor of an update. Those of a chunk are read while they are still in the
processor's cache; the backward writes its gradient over them, and their memory is lent again to the
next update, as fresh memory costs a core as much as half of the product that fills it. Beyond
`KEPT_BYTES` they are made a second time in the backward instead of being kept.
Shapes: N tokens, H hidden, V vocabulary.
"""

import weakref
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_BYTES = 1 << 20
"""Logits that are read at once: what a core's own cache holds beside its other guests."""
PRODUCT_BYTES = 1 << 23
"""Logits that are made at once: enough rows for the product to be at its best."""
KEPT_BYTES = 1 << 30
"""Logits that are kept for the backward at most."""


class Scratch:
    """Memory for the logits of one update after another."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._lent: weakref.ref[Tensor] | None = None

    def lend(self, like: Tensor, shape: tuple[int, int]) -> Tensor:
        """Lend an uninitialised tensor; its memory is free again as soon as the tensor is gone.

        Args:
            like: gives dtype and device.
            shape: rows and width.
        """
        if self._lent is not None and self._lent() is not None:
            return like.new_empty(shape)  # somebody still reads the other one
        size = shape[0] * shape[1]
        held = self._memory
        fits = held is not None and (held.dtype, held.device) == (like.dtype, like.device)
        if held is None or not fits or held.numel() < size:
            self._memory = held = like.new_empty(size)
        lent = held[:size].view(shape)
        self._lent = weakref.ref(lent)
        return lent


def projected_losses_and_entropies(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, scratch: Scratch
) -> tuple[Tensor, Tensor]:
    """Compute -log p(target) and p's entropy, p = softmax(hidden @ weight.T / temperature).

    Args:
        hidden: (N, H), any float dtype.
        weight: (V, H), of the same dtype.
        targets: (N,) int64, each a token.
        temperature: above 0.
        scratch: where the logits are kept.

    Returns:
        Losses (N,) float32, and entropies (N,) float32 in nats; both take a gradient.
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
        targets: (N,) int64, each a token.
        temperature: above 0.

    Returns:
        Losses (N,) float32, and entropies (N,) float32 in nats; both take a gradient.
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
        """Compute losses and entropies; keep the logits, given room, if a gradient is wanted."""
        count, vocabulary = hidden.shape[0], weight.shape[0]
        needed = any(ctx.needs_input_grad[:2])
        keep = needed and count * vocabulary * hidden.element_size() <= KEPT_BYTES
        chunk = min(count, _rows(PRODUCT_BYTES, vocabulary))
        logits = scratch.lend(hidden, (count if keep else chunk, vocabulary))
        statistics = hidden.new_empty(3, count, dtype=torch.float32)
        for part in _parts(count, chunk):
            own = logits[part] if keep else logits[: part.stop - part.start]
            torch.mm(hidden[part], weight.t(), out=own)
            _read(own, targets[part], temperature, statistics[:, part])
        ctx.save_for_backward(hidden, weight, targets, statistics)
        ctx.temperature, ctx.scratch = temperature, scratch
        ctx.logits = logits if keep else None
        ctx.set_materialize_grads(False)
        return statistics[1], statistics[2]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_losses: Tensor | None, of_entropies: Tensor | None) -> Any:
        """Compute gradients of hidden states and weight; a second call makes the logits anew."""
        hidden, weight, targets, statistics = ctx.saved_tensors
        count, vocabulary = hidden.shape[0], weight.shape[0]
        kept, ctx.logits = ctx.logits, None
        chunk = min(count, _rows(PRODUCT_BYTES, vocabulary))
        delta = ctx.scratch.lend(hidden, (chunk, vocabulary)) if kept is None else kept
        of_hidden = torch.empty_like(hidden)
        of_weight = None  # zeros of a large vocabulary are not made where nothing is added to them
        if kept is None:
            of_weight = weight.new_zeros(weight.shape, dtype=torch.float32)
        for part in _parts(count, chunk):
            own = delta[part] if kept is not None else delta[: part.stop - part.start]
            if kept is None:
                torch.mm(hidden[part], weight.t(), out=own)
            gradients = [None if g is None else g[part] for g in (of_losses, of_entropies)]
            _differentiate(own, targets[part], ctx.temperature, statistics[:, part], *gradients)
            torch.mm(own, weight, out=of_hidden[part])
            if of_weight is not None:
                of_weight += own.t() @ hidden[part]
        if of_weight is None:
            of_weight = delta.t() @ hidden
        return of_hidden, of_weight.to(weight.dtype), None, None, None


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> Any:
        """Compute losses and entropies; keep the logits and their log-normalisers."""
        statistics = logits.new_empty(3, logits.shape[0], dtype=torch.float32)
        _read(logits, targets, temperature, statistics)
        ctx.save_for_backward(logits, targets, statistics)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return statistics[1], statistics[2]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_losses: Tensor | None, of_entropies: Tensor | None) -> Any:
        """Compute the gradient of the logits."""
        logits, targets, statistics = ctx.saved_tensors
        delta = logits.clone()
        _differentiate(delta, targets, ctx.temperature, statistics, of_losses, of_entropies)
        return delta, None, None


def _read(logits: Tensor, targets: Tensor, temperature: float, out: Tensor) -> None:
    """Write log-normalisers, losses and entropies of logits (N, V) into `out` (3, N)."""
    for part in _parts(logits.shape[0], _rows(CHUNK_BYTES, logits.shape[1])):
        scores = logits[part].float()
        scores = scores / temperature if temperature != 1.0 else scores
        highest = scores.amax(1, keepdim=True)
        shifted = scores - highest
        hits = shifted.gather(1, targets[part, None])[:, 0]
        weights = shifted.exp()
        total = weights.sum(1)
        logarithm = total.log()
        out[0, part] = logarithm + highest[:, 0]
        out[1, part] = logarithm - hits
        out[2, part] = logarithm - weights.mul_(shifted).sum(1) / total


def _differentiate(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    statistics: Tensor,
    of_losses: Tensor | None,
    of_entropies: Tensor | None,
) -> None:
    """Write the gradient of logits (N, V) over them.

    With z = logits / temperature, of a loss it is p - onehot(target), of an entropy H it is
    -p·(log p + H), each by its token's gradient and divided by the temperature.
    """
    for part in _parts(logits.shape[0], _rows(CHUNK_BYTES, logits.shape[1])):
        scores = logits[part].float()
        scores = scores / temperature if temperature != 1.0 else scores
        logprobs = scores - statistics[0, part, None]
        delta = logprobs.exp() if of_entropies is not None else logprobs.exp_()
        extra = None
        if of_entropies is not None:
            share = of_entropies[part, None] / temperature
            extra = logprobs.add_(statistics[2, part, None]).mul_(delta).mul_(share)
        if of_losses is None:
            delta.zero_()
        else:
            delta.scatter_add_(1, targets[part, None], delta.new_full((len(delta), 1), -1.0))
            delta.mul_(of_losses[part, None] / temperature)
        logits[part] = delta if extra is None else delta.sub_(extra)


def _rows(size_bytes: int, vocabulary: int) -> int:
    return max(1, size_bytes // (4 * vocabulary))


def _parts(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, max(size, 1)):
        yield slice(start, min(start + size, count))
