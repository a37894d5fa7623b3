"""Log-probabilities of given tokens under ``hidden @ weight.T``, in chunks of logits.

Forward and backward both compute the logits in chunks; one value per row is saved between them,
two with entropies. The weight gradient is accumulated in float32.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ms_kernels.contracts.arguments import Argument, Ladder, Option, Work, indices
from ms_kernels.contracts.call import Dims, accumulator
from ms_kernels.contracts.contract import Contract
from ms_kernels.contracts.indices import check_classes
from ms_kernels.contracts.options import flag, ignore_index_option
from ms_kernels.contracts.tolerance import LOGITS
from ms_kernels.contracts.transforms import transforms_active
from ms_kernels.contracts.values import MAX_FINITE, MIN_NORMAL, is_number
from ms_kernels.operators.cross_entropy.contract import classes
from ms_kernels.operators.linear_cross_entropy.chunked_logits import (
    GradientSums,
    chunk_rows_of,
    chunks_of,
)
from ms_kernels.operators.linear_cross_entropy.contract import logits_work


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    temperature: float = 1.0,
    ignore_index: int = -100,
    entropy: bool = False,
    *,
    chunk_rows: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return ``log softmax(hidden @ weight.T / temperature)[token]``, and entropies if asked."""
    if transforms_active():
        return _plain(hidden, weight, tokens, temperature, ignore_index, entropy)
    if chunk_rows is None:
        chunk_rows = chunk_rows_of(hidden, weight)
    log_probs, entropies = _TokenLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        tokens.reshape(-1),
        temperature,
        ignore_index,
        entropy,
        chunk_rows,
    )
    if entropy:
        return log_probs.reshape(tokens.shape), entropies.reshape(tokens.shape)
    result: Tensor = log_probs.reshape(tokens.shape)
    return result


def _plain(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    temperature: float,
    ignore_index: int,
    entropy: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute the same from all logits at once, out of place, as torch.func transforms require."""
    wide = accumulator(hidden.dtype)
    log_probs = (hidden.to(wide) @ weight.to(wide).T / temperature).log_softmax(-1)
    ignored = tokens == ignore_index
    index = tokens.to(torch.int64).masked_fill(ignored, 0).unsqueeze(-1)
    chosen = log_probs.gather(-1, index).squeeze(-1).masked_fill(ignored, 0)
    if not entropy:
        return chosen
    return chosen, -(log_probs.exp() * log_probs).sum(-1).masked_fill(ignored, 0)


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # (N, H)
        weight: Tensor,  # (V, H)
        tokens: Tensor,  # (N,)
        temperature: float,
        ignore_index: int,
        entropy: bool,
        chunk_rows: int,
    ) -> tuple[Tensor, Tensor]:
        ignored = tokens == ignore_index
        token_index = tokens.to(torch.int64).masked_fill(ignored, 0)
        log_z = hidden.new_empty(tokens.shape, dtype=accumulator(hidden.dtype))
        log_probs, entropies = torch.empty_like(log_z), torch.zeros_like(log_z)
        for rows, logits in chunks_of(hidden, weight, chunk_rows):
            logits.div_(temperature)
            log_z[rows] = logits.logsumexp(-1)
            log_probs[rows] = logits.gather(-1, token_index[rows, None]).squeeze(-1) - log_z[rows]
            if entropy:
                entropies[rows] = _entropy(logits, log_z[rows])
        ctx.save_for_backward(hidden, weight, token_index, ignored, log_z, entropies)
        ctx.temperature, ctx.entropy, ctx.chunk_rows = temperature, entropy, chunk_rows
        # Out of place: torch 2.11's compiler drops the gradient of an output changed in place.
        return log_probs.masked_fill(ignored, 0), entropies.masked_fill(ignored, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, token_index, ignored, log_z, entropies = ctx.saved_tensors
        scaled_grad = grad.masked_fill(ignored, 0).unsqueeze(-1) / ctx.temperature
        scaled_grad_entropy = grad_entropy.masked_fill(ignored, 0).unsqueeze(-1) / ctx.temperature
        sums = GradientSums(hidden, weight, ctx.needs_input_grad)
        for rows, logits in chunks_of(hidden, weight, ctx.chunk_rows):
            # d log p[t] = e_t - p, and dH = -p · (log p + H).
            logits.div_(ctx.temperature).sub_(log_z[rows, None])
            factor = -scaled_grad[rows]
            if ctx.entropy:
                factor = factor - scaled_grad_entropy[rows] * (logits + entropies[rows, None])
            logits.exp_().mul_(factor)
            logits.scatter_add_(-1, token_index[rows, None], scaled_grad[rows])
            sums.add(logits, hidden[rows], weight, rows)
        grads = (
            total if total is None else total.to(like.dtype)
            for total, like in ((sums.hidden, hidden), (sums.weight, weight))
        )
        return (*grads, *(None,) * 5)


def _entropy(logits: Tensor, total: Tensor) -> Tensor:
    """Return ``-Σ p log p``; overwrites the logits (R, V)."""
    logits.sub_(total.unsqueeze(-1))
    return -logits.mul_(logits.exp()).sum(-1)


def _weight(shape: tuple[int, ...], dims: Dims, generator: torch.Generator) -> Tensor:
    """Draw a random output embedding with logits of order one."""
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    return normal / math.sqrt(dims["H"])


def _backward(dims: Dims, itemsize: int) -> Work:
    """Count three matrix products: the logits are recomputed."""
    rows, width, classes_ = dims["..."], dims["H"], dims["V"]
    return Work(2 * (rows + classes_) * width * itemsize, 6 * rows * width * classes_)


CONTRACT = Contract(
    name="token_log_probs",
    summary="log softmax(hidden @ weight.T / temperature)[token] without holding all logits",
    arguments=(
        Argument(name="hidden", dims="... H"),
        Argument(name="weight", dims="V H", like="hidden", draw=_weight),
        indices("tokens", "...", classes),
    ),
    options=(
        Option(
            name="temperature",
            default=1.0,
            holds=lambda value: is_number(value, MIN_NORMAL),
            fits=f"a number above 0, from {MIN_NORMAL} to {MAX_FINITE}",
            trials=(2.0,),
        ),
        ignore_index_option,
        flag("entropy"),
    ),
    returns="(...) float32; with entropy=True a second one, the entropies",
    results={"log_probs": "...", "entropies": "..."},
    wide=True,
    positive="H V",
    explain_error=lambda hidden, weight, tokens, temperature, ignore_index, entropy: check_classes(
        "token_log_probs", tokens, weight.shape[0], ignore_index, "tokens"
    ),
    forward=logits_work,
    backward=_backward,
    tolerance=LOGITS,
    example={"...": 512, "H": 64, "V": 256},
    reference=token_log_probs,
    ladders=(Ladder({"H": 128, "V": 4096}, ("...",)),),
)
