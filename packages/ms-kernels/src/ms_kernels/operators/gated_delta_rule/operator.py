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
    """Gated delta rule, the linear attention of Gated DeltaNet (arXiv 2412.06464).

    Each head has a state matrix S, initially `state`. At each position, in this order:
    ``S ← e^g · S``, then ``S ← S + k (β · (v - Sᵀ k))ᵀ``, then the output is ``scale · Sᵀ q``.
    Value head h uses key head ``h // (Hv / Hk)``.

    Args:
        q: (B, S, Hk, D).
        k: (B, S, Hk, D), dtype of q. Keys with a norm well above 1 make the state diverge.
        v: (B, S, Hv, Dv), dtype of q; Hk divides Hv.
        g: log decay (B, S, Hv), 0 or less.
        beta: update rate (B, S, Hv), from 0 to 1.
        documents: document ids (B, S) int32 or int64. S is reset to 0 where the id changes.
        state: (B, Hv, D, Dv) float32 or float64: S before the first position, for the document
            that it continues. None: zeros.
        scale: factor applied to the output. None: ``D ** -0.5``.
        normalize: scale q and k to unit length first, ``x / sqrt(Σx² + 1e-6)``.
        final_state: also return S after the last position.

    Returns:
        (B, S, Hv, Dv), dtype of q; with `final_state` also (B, Hv, D, Dv), float32 (float64 for
        float64). Passing it to the next call processes a sequence in chunks with the same result.
    """
    tensors = q, k, v, g, beta, documents, state
    return perform(CONTRACT, tensors, (scale, normalize, final_state))
