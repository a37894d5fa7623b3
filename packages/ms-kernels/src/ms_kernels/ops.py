"""The operators: each checks its arguments, takes a backend and runs it.

All are batch-first and differentiable, keep sums in float32 (float64 for float64) and round
their result once. `B` is the batch, `S` positions, `H` the width of the model, `D` of a head,
`V` classes, `...` any leading dims. Any strides will do. Rows may be none; widths may not be 0.

Every operator raises `ArgumentError` when an argument does not fit, and `BackendError` when no
backend that `use_backend` allows takes the call. Class indices alone are data: on the CPU one out
of range raises `ArgumentError` too; an accelerator reports it as it reports any bad index.
"""

from typing import Literal

from torch import Tensor

from ms_kernels.dispatch import CONTRACTS, implementation
from ms_kernels.errors import ArgumentError

__all__ = [
    "attention",
    "cross_entropy",
    "linear_cross_entropy",
    "rms_norm",
    "rotary",
    "swiglu",
]

_RMS_NORM = CONTRACTS["rms_norm"]
_ROTARY = CONTRACTS["rotary"]
_SWIGLU = CONTRACTS["swiglu"]
_ATTENTION = CONTRACTS["attention"]
_CROSS_ENTROPY = CONTRACTS["cross_entropy"]
_LINEAR_CROSS_ENTROPY = CONTRACTS["linear_cross_entropy"]


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Normalise by the root mean square over the last dim (arXiv 1910.07467).

    Args:
        x: (..., H).
        weight: (H,), of x's dtype or another floating one.
        eps: added to the mean square.

    Returns:
        ``x / sqrt(mean(x²) + eps) · weight``, (..., H), dtype of x.
    """
    run = implementation(_RMS_NORM, (x, weight), (eps,))
    result: Tensor = run(x, weight, eps)
    return result


def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by the angles of their positions (arXiv 2104.09864).

    Args:
        q: (B, S, Hq, D).
        k: (B, S, Hk, D), dtype of q.
        cos: (B or 1, S, R/2) float32, cosines of the angles; R ≤ D is the width that is rotated,
            the rest passes through. It has no gradient.
        sin: sines, likewise.
        interleaved: whether features 2i and 2i+1 are a pair, rather than i and i + R/2.

    Returns:
        q and k, rotated; shapes and dtypes as given.
    """
    run = implementation(_ROTARY, (q, k, cos, sin), (interleaved,))
    result: tuple[Tensor, Tensor] = run(q, k, cos, sin, interleaved)
    return result


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Gate a feed-forward block (arXiv 2002.05202).

    Args:
        gate: (..., I).
        up: (..., I), dtype of gate.

    Returns:
        ``silu(gate) · up``, (..., I), dtype of gate.
    """
    run = implementation(_SWIGLU, (gate, up), ())
    result: Tensor = run(gate, up)
    return result


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    documents: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attend by scaled dot products, with grouped queries.

    Queries are the last Sq of the Sk positions, so a cache of keys and values needs no more than
    to be passed whole. Query head h reads key head ``h // (Hq / Hk)``.

    Args:
        q: (B, Sq, Hq, D), Sq ≤ Sk.
        k: (B, Sk, Hk, D), dtype of q; Hk divides Hq.
        v: (B, Sk, Hk, D), dtype of q.
        causal: whether a query sees no later position.
        documents: (B, Sk) int32 or int64; a query sees only positions of its own document.
        window: positions seen, counting the query's own: distances below `window`, to both sides
            if not causal.
        scale: factor of the scores, ``D ** -0.5`` if None.

    Returns:
        (B, Sq, Hq, D), dtype of q.
    """
    run = implementation(_ATTENTION, (q, k, v, documents), (causal, window, scale))
    result: Tensor = run(q, k, v, documents, causal, window, scale)
    return result


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:
    """Return ``-(1 - s) log p[target] - s mean(log p) + z log²Z``, where Z = Σ exp(logits).

    Args:
        logits: (..., V).
        targets: (...) int64 or int32, classes from 0 to V - 1, or `ignore_index`.
        ignore_index: the target of a row that does not count.
        label_smoothing: s, the share of the target's weight that is spread over all classes.
        z_loss: z, which keeps Z near 1 (arXiv 2204.02311).
        reduction: ``"mean"`` over the rows that count (NaN when none does, as torch's),
            ``"sum"``, or ``"none"``: (...), 0 for a row that does not count.

    Returns:
        float32 (float64 for float64).
    """
    options = (ignore_index, label_smoothing, z_loss, reduction)
    run = implementation(_CROSS_ENTROPY, (logits, targets), options)
    try:
        result: Tensor = run(logits, targets, *options)
    except (IndexError, RuntimeError):
        _check_classes("cross_entropy", targets, logits.shape[-1], ignore_index)
        raise
    return result


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:
    """Return `cross_entropy` of ``hidden @ weight.T`` without ever holding all logits.

    The gradients of a reduced loss are made in the forward pass, so they are held instead of
    logits: float32, the sizes of hidden and weight. It cannot be differentiated twice.

    Args:
        hidden: (..., H).
        weight: (V, H), dtype of hidden.
        targets: (...) int64 or int32, classes from 0 to V - 1, or `ignore_index`.
        ignore_index: the target of a row that does not count.
        label_smoothing: as for `cross_entropy`.
        z_loss: as for `cross_entropy`.
        reduction: as for `cross_entropy`. ``"none"`` makes the logits twice when they exceed
            64 MiB: a third more work.

    Returns:
        float32 (float64 for float64): () or, with ``"none"``, (...).
    """
    options = (ignore_index, label_smoothing, z_loss, reduction)
    run = implementation(_LINEAR_CROSS_ENTROPY, (hidden, weight, targets), options)
    try:
        result: Tensor = run(hidden, weight, targets, *options)
    except (IndexError, RuntimeError):
        _check_classes("linear_cross_entropy", targets, weight.shape[0], ignore_index)
        raise
    return result


def _check_classes(operator: str, targets: Tensor, count: int, ignore_index: int) -> None:
    """Find the class that made an operator fail; looked for only then, so it costs nothing."""
    if type(targets) is not Tensor or targets.device.type != "cpu":
        return
    wrong = targets[(targets != ignore_index) & ((targets < 0) | (targets >= count))]
    if wrong.numel():
        got, fits = f"{wrong[0].item()} somewhere", f"from 0 to {count - 1}, or {ignore_index}"
        raise ArgumentError(operator, "targets", got, fits)
