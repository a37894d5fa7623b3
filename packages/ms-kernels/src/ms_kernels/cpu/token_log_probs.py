"""Log-probabilities of the rows that count alone, found before any work is done."""

from torch import Tensor

from ms_kernels.contract import accumulator
from ms_kernels.reference.token_log_probs import token_log_probs as every_row

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
    options = (temperature, ignore_index, entropy)
    flat = tokens.reshape(-1)
    rows = (flat != ignore_index).nonzero().squeeze(-1)
    # The copy of hidden must be worth it: leave out at least one row in sixteen.
    if len(rows) > flat.numel() - flat.numel() // 16:
        return every_row(hidden, weight, tokens, *options)
    chosen = hidden.reshape(-1, hidden.shape[-1]).index_select(0, rows)
    found = every_row(chosen, weight, flat[rows], *options)
    empty = hidden.new_zeros(flat.shape, dtype=accumulator(hidden.dtype))
    spread = [
        empty.index_copy(0, rows, each).view(tokens.shape)
        for each in (found if isinstance(found, tuple) else (found,))
    ]
    return (spread[0], spread[1]) if entropy else spread[0]
