"""Log-probabilities of chosen tokens under ``hidden @ weight.T``, in chunks of logits.

Forward and backward each make the logits in chunks; between them one number a row is held, two
with entropies. The weight's gradient is summed in float32.
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
from ms_kernels.contracts.values import LARGEST, SMALLEST, is_number
from ms_kernels.operators.cross_entropy.contract import classes
from ms_kernels.operators.linear_cross_entropy.chunked_logits import Sums, chunk_rows_of, chunks_of
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
    """Return ``log softmax(hidden @ weight.T / temperature)[token]``, and perhaps entropies."""
    if transforms_active():
        return _plain(hidden, weight, tokens, temperature, ignore_index, entropy)
    if chunk_rows is None:
        chunk_rows = chunk_rows_of(hidden, weight)
    chosen, spread = _Chosen.apply(  # type: ignore[no-untyped-call]
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        tokens.reshape(-1),
        temperature,
        ignore_index,
        entropy,
        chunk_rows,
    )
    if entropy:
        return chosen.reshape(tokens.shape), spread.reshape(tokens.shape)
    result: Tensor = chosen.reshape(tokens.shape)
    return result


def _plain(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    temperature: float,
    ignore_index: int,
    entropy: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """The same with all logits at once and nothing in place, which torch.func can transform."""
    wide = accumulator(hidden.dtype)
    log_probs = (hidden.to(wide) @ weight.to(wide).T / temperature).log_softmax(-1)
    ignored = tokens == ignore_index
    index = tokens.to(torch.int64).masked_fill(ignored, 0).unsqueeze(-1)
    chosen = log_probs.gather(-1, index).squeeze(-1).masked_fill(ignored, 0)
    if not entropy:
        return chosen
    return chosen, -(log_probs.exp() * log_probs).sum(-1).masked_fill(ignored, 0)


class _Chosen(torch.autograd.Function):
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
        places = tokens.to(torch.int64).masked_fill(ignored, 0)
        total = hidden.new_empty(tokens.shape, dtype=accumulator(hidden.dtype))
        chosen, spread = torch.empty_like(total), torch.zeros_like(total)
        for rows, logits in chunks_of(hidden, weight, chunk_rows):
            logits.div_(temperature)
            total[rows] = logits.logsumexp(-1)
            chosen[rows] = logits.gather(-1, places[rows, None]).squeeze(-1) - total[rows]
            if entropy:
                spread[rows] = _entropy(logits, total[rows])
        ctx.save_for_backward(hidden, weight, places, ignored, total, spread)
        ctx.temperature, ctx.entropy, ctx.chunk_rows = temperature, entropy, chunk_rows
        # Changed in place and returned, it would lose its gradient in torch 2.11's compiler.
        return chosen.masked_fill(ignored, 0), spread.masked_fill(ignored, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_spread: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, places, ignored, total, spread = ctx.saved_tensors
        pull = grad.masked_fill(ignored, 0).unsqueeze(-1) / ctx.temperature
        pull_spread = grad_spread.masked_fill(ignored, 0).unsqueeze(-1) / ctx.temperature
        sums = Sums(hidden, weight, ctx.needs_input_grad)
        for rows, logits in chunks_of(hidden, weight, ctx.chunk_rows):
            # d log p[t] = e_t - p, and dH = -p · (log p + H).
            logits.div_(ctx.temperature).sub_(total[rows, None])
            factor = -pull[rows]
            if ctx.entropy:
                factor = factor - pull_spread[rows] * (logits + spread[rows, None])
            logits.exp_().mul_(factor)
            logits.scatter_add_(-1, places[rows, None], pull[rows])
            sums.add(logits, hidden[rows], weight, rows)
        grads = (
            held if held is None else held.to(like.dtype)
            for held, like in ((sums.hidden, hidden), (sums.weight, weight))
        )
        return (*grads, *(None,) * 5)


def _entropy(logits: Tensor, total: Tensor) -> Tensor:
    """Return ``-Σ p log p``; the logits (R, V) are spent."""
    logits.sub_(total.unsqueeze(-1))
    return -logits.mul_(logits.exp()).sum(-1)


def _weight(shape: tuple[int, ...], dims: Dims, generator: torch.Generator) -> Tensor:
    """Draw an output embedding whose logits are of order one."""
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    return drawn / math.sqrt(dims["H"])


def _backward(dims: Dims, itemsize: int) -> Work:
    """Count three products, as the logits are made again."""
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
            holds=lambda value: is_number(value, SMALLEST),
            fits=f"a number above 0, from {SMALLEST} to {LARGEST}",
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
