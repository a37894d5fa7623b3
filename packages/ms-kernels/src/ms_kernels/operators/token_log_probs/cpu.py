"""Log-probabilities computed only for the rows that are not ignored."""

from typing import Any

from torch import Tensor

from ms_kernels.backends.cpu import on_cpu
from ms_kernels.operators.linear_cross_entropy.cpu import MERIT, on_valid_rows
from ms_kernels.operators.token_log_probs.contract import CONTRACT


def token_log_probs(
    hidden: Tensor, weight: Tensor, tokens: Tensor, *options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """Return ``log softmax(hidden @ weight.T / temperature)[token]``, and entropies if asked."""
    result: Tensor | tuple[Tensor, Tensor] = on_valid_rows(
        lambda *tensors: CONTRACT.reference(*tensors, *options),
        *(hidden, weight, tokens),
        ignore_index=options[1],
    )
    return result


IMPLEMENTATION = on_cpu(CONTRACT, token_log_probs, MERIT, pays_from=0)
