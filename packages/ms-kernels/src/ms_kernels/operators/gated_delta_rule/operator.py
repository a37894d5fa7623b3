"""The public function `gated_delta_rule`."""

from typing import Literal, overload

from torch import Tensor

from ms_kernels.core.dispatch import perform
from ms_kernels.operators.gated_delta_rule.contract import CONTRACT


@overload
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    documents: Tensor | None = None,
    state: Tensor | None = None,
    scale: float | None = None,
    normalize: bool = False,
    final_state: Literal[False] = False,
) -> Tensor: ...


@overload
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    documents: Tensor | None = None,
    state: Tensor | None = None,
    scale: float | None = None,
    normalize: bool = False,
    final_state: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    documents: Tensor | None = None,
    state: Tensor | None = None,
    scale: float | None = None,
    normalize: bool = False,
    final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Read a matrix that fades and learns at each position (arXiv 2412.06464).

    A head's matrix S starts as `state`. At each position, in this order: ``S ← e^g · S``, then
    ``S ← S + k (β · (v - Sᵀ k))ᵀ``, then the result is ``scale · Sᵀ q``. Value head h goes with
    key head ``h // (Hv / Hk)``.

    Args:
        q: (B, S, Hk, D).
        k: (B, S, Hk, D), dtype of q. Keys much longer than 1 let the matrix grow without bound.
        v: (B, S, Hv, Dv), dtype of q; Hk divides Hv.
        g: (B, S, Hv), the decay's logarithm, 0 or less.
        beta: (B, S, Hv), the share that is learnt, from 0 to 1.
        documents: (B, S) int32 or int64; a new one begins where the number changes, with S = 0.
        state: (B, Hv, D, Dv) float32 or float64: S before the first position, of the document that
            it goes on with; zeros if None.
        scale: factor of the results, ``D ** -0.5`` if None.
        normalize: whether q and k are first brought to length 1, ``x / sqrt(Σx² + 1e-6)``.
        final_state: whether to return S after the last position as well.

    Returns:
        (B, S, Hv, Dv), dtype of q; with `final_state` also (B, Hv, D, Dv), float32 (float64 for
        float64). A state goes from call to call: pieces of a sequence give what the whole gives.
    """
    tensors = q, k, v, g, beta, documents, state
    return perform(CONTRACT, tensors, (scale, normalize, final_state))
