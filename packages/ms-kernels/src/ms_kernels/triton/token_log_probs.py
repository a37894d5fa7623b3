"""Log-probabilities of chosen tokens: products in half precision, rows fused, chunk by chunk.

The backward pass makes the logits again; between the two passes three numbers a row are held.
"""

import torch
from torch import Tensor

from ms_kernels.library import is_wanted, opaque, unwanted
from ms_kernels.reference import CONTRACTS
from ms_kernels.triton.cross_entropy import walk
from ms_kernels.triton.launching import blocks, launch
from ms_kernels.triton.logit_chunks import Sums, chunks, lifted, room_for_gradient, scaled
from ms_kernels.triton.rows import as_rows, empty

__all__ = ["token_log_probs"]


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    temperature: float = 1.0,
    ignore_index: int = -100,
    entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return ``log softmax(hidden @ weight.T / temperature)[token]``, and perhaps entropies."""
    chosen: Tensor
    spread: Tensor
    chosen, spread = _chosen(hidden, weight, tokens, temperature, ignore_index, entropy)
    return (chosen, spread) if entropy else chosen


def _forward(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    temperature: float,
    ignore_index: int,
    entropy: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, places = as_rows(hidden), tokens.reshape(-1).contiguous()
    made = _fake(hidden, weight, tokens, temperature, ignore_index, entropy)
    chosen, spread, totals = (each.view(-1) for each in made)
    for part, logits in chunks(rows, weight):
        launch(
            "token_log_probs.chosen_forward",
            len(logits),
            logits,
            *(logits, places[part], chosen[part], spread[part], totals[part]),
            *(logits.shape[1], logits.stride(0), ignore_index, 1 / temperature),
            **walk("token_log_probs", "chosen_forward", hidden, len(weight)),
        )
    return made


def _fake(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    temperature: float,
    ignore_index: int,
    entropy: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        empty(tokens, torch.float32),
        empty(tokens, torch.float32),
        empty(tokens, torch.float32),
    )


def _backward(
    grad: Tensor,
    grad_spread: Tensor,
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    totals: Tensor,
    entropies: Tensor,
    wanted: int,
    temperature: float,
    ignore_index: int,
    entropy: bool,
) -> tuple[Tensor, Tensor]:
    rows, places = as_rows(hidden), tokens.reshape(-1).contiguous()
    of_hidden, of_weight = is_wanted(wanted, 0), is_wanted(wanted, 1)
    sums = Sums(rows, weight, of_hidden=of_hidden, of_weight=of_weight)
    peak, (pulls, spread_pulls) = lifted(hidden.dtype, grad.view(-1), grad_spread.view(-1))
    constants = walk("token_log_probs", "chosen_backward", hidden, len(weight))
    totals, spread = totals.view(-1), entropies.view(-1)
    for part, logits in chunks(rows, weight):
        gradient = room_for_gradient(logits, hidden)
        count, classes = logits.shape
        launch(
            "token_log_probs.chosen_backward",
            count * blocks(classes, constants["BLOCK"]),
            logits,
            *(logits, places[part], totals[part], spread[part], pulls[part], spread_pulls[part]),
            *(gradient, classes, logits.stride(0), gradient.stride(0)),
            *(ignore_index, 1 / temperature),
            **constants,
        )
        sums.add(gradient, rows, weight, part)
    return (
        unwanted(hidden)
        if sums.hidden is None
        else scaled("token_log_probs", sums.hidden, peak, hidden),
        unwanted(weight)
        if sums.weight is None
        else scaled("token_log_probs", sums.weight, peak, weight),
    )


_chosen = opaque(
    CONTRACTS["token_log_probs"],
    "triton",
    forward=_forward,
    fake=_fake,
    kept={"totals": "..."},
    backward=_backward,
    saves=("hidden", "weight", "tokens", "totals", "entropies"),
)
