"""The operators: each checks its arguments, takes a backend and runs it.

All are batch-first, keep sums in float32 (float64 for float64) and round
their result once. `B` is the batch, `S` positions, `H` the width of the model, `D` of a head,
`V` classes, `...` any leading dims. Any strides will do. Rows may be none; widths may not be 0.

Every operator raises `ArgumentError` when an argument does not fit, and `BackendError` when no
backend that `use_backend` allows takes the call. Indices are data: on the CPU one out of range
raises `ArgumentError` too. An accelerator is not waited for to look: no kernel of ours reads or
writes what such an index names, and what depends on it is NaN; torch's own operators, which the
reference is made of there, stop the device instead, and torch_npu's for experts get indices as they
are. Nothing is looked at while torch.compile traces.
"""

from functools import partial
from typing import Any, Literal, overload

import torch
from torch import Tensor

from ms_kernels.contract import Contract
from ms_kernels.dispatch import CONTRACTS, describe_call, implementation
from ms_kernels.errors import ArgumentError
from ms_kernels.indices import check_classes, check_counts, check_pages, check_places, check_range
from ms_kernels.overlaps import check_overlaps
from ms_kernels.split_rows import is_split, permuted, rows_mapped, rows_reduced

__all__ = [
    "adamw_step",
    "add_rms_norm",
    "attention",
    "cross_entropy",
    "decode_attention",
    "geglu",
    "grouped_matmul",
    "layer_norm",
    "linear_cross_entropy",
    "permute_tokens",
    "quantized_linear",
    "rms_norm",
    "rotary",
    "swiglu",
    "token_log_probs",
    "unpermute_tokens",
]

_RMS_NORM = CONTRACTS["rms_norm"]
_ROTARY = CONTRACTS["rotary"]
_SWIGLU = CONTRACTS["swiglu"]
_ATTENTION = CONTRACTS["attention"]
_CROSS_ENTROPY = CONTRACTS["cross_entropy"]
_LINEAR_CROSS_ENTROPY = CONTRACTS["linear_cross_entropy"]
_ADD_RMS_NORM = CONTRACTS["add_rms_norm"]
_LAYER_NORM = CONTRACTS["layer_norm"]
_GEGLU = CONTRACTS["geglu"]
_DECODE_ATTENTION = CONTRACTS["decode_attention"]
_TOKEN_LOG_PROBS = CONTRACTS["token_log_probs"]
_PERMUTE_TOKENS = CONTRACTS["permute_tokens"]
_UNPERMUTE_TOKENS = CONTRACTS["unpermute_tokens"]
_GROUPED_MATMUL = CONTRACTS["grouped_matmul"]
_QUANTIZED_LINEAR = CONTRACTS["quantized_linear"]
_ADAMW_STEP = CONTRACTS["adamw_step"]


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


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Add a residual and normalise the sum, as ``rms_norm(x + residual, weight, eps)`` would.

    Args:
        x: (..., H).
        residual: (..., H), dtype of x.
        weight: (H,), of x's dtype or another floating one.
        eps: added to the mean square.

    Returns:
        The normalised sum and the sum itself, (..., H), dtype of x. What is normalised is the sum
        after it was rounded to that dtype.
    """
    run = implementation(_ADD_RMS_NORM, (x, residual, weight), (eps,))
    result: tuple[Tensor, Tensor] = run(x, residual, weight, eps)
    return result


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Normalise by mean and variance over the last dim (arXiv 1607.06450).

    Args:
        x: (..., H).
        weight: (H,), of x's dtype or another floating one.
        bias: (H,), dtype of weight; none if None.
        eps: added to the variance.

    Returns:
        ``(x - mean) / sqrt(variance + eps) · weight + bias``, (..., H), dtype of x.
    """
    run = implementation(_LAYER_NORM, (x, weight, bias), (eps,))
    result: Tensor = run(x, weight, bias, eps)
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


def geglu(gate: Tensor, up: Tensor, *, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """Gate a feed-forward block by GELU (arXiv 2002.05202).

    Args:
        gate: (..., I).
        up: (..., I), dtype of gate.
        approximate: ``"none"`` for the exact GELU, ``"tanh"`` for the one that Gemma uses.

    Returns:
        ``gelu(gate) · up``, (..., I), dtype of gate.
    """
    run = implementation(_GEGLU, (gate, up), (approximate,))
    result: Tensor = run(gate, up, approximate)
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


def decode_attention(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attend from one new position a sequence to all its positions, kept in pages.

    Position p of sequence b stands in page ``page_table[b, p // page]`` at place ``p % page``, the
    new one, ``lengths[b] - 1``, included. It has no gradient.

    Args:
        q: (B, Hq, D).
        key_pages: (P, page, Hk, D), dtype of q; Hk divides Hq.
        value_pages: likewise.
        page_table: (B, N) int32. Entries of pages that lie past a sequence's end, or wholly before
            its window, are not read.
        lengths: (B,) int32, positions of each sequence, from 0 to N · page.
        window: positions seen, the newest ones; all if None.
        scale: factor of the scores, ``D ** -0.5`` if None.

    Returns:
        (B, Hq, D), dtype of q; 0 for a sequence of length 0. A length or a page in use that is out
        of range raises on the CPU; on an accelerator nothing is read for it, and the sequence's
        result is NaN.
    """
    tensors = (q, key_pages, value_pages, page_table, lengths)
    run = implementation(_DECODE_ATTENTION, tensors, (window, scale))
    pages, page = key_pages.shape[:2]
    check_pages(page_table, lengths, pages, page, window)
    result: Tensor = run(*tensors, window, scale)
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
        reduction: ``"mean"`` over the rows that count (0 when none does, where torch's is NaN:
            so a rank without targets adds nothing), ``"sum"``, or ``"none"``: (...), 0 for a row
            that does not count.

    Returns:
        float32 (float64 for float64).
    """
    options = (ignore_index, label_smoothing, z_loss, reduction)
    run = implementation(_CROSS_ENTROPY, (logits, targets), options)
    try:
        result: Tensor = run(logits, targets, *options)
    except (IndexError, RuntimeError):
        check_classes("cross_entropy", targets, logits.shape[-1], ignore_index)
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
        reduction: as for `cross_entropy`. With ``"none"`` and logits above 64 MiB an accelerator
            makes them twice: a third more work. The CPU makes again only those rows whose
            gradients differ from what most rows get.

    Returns:
        float32 (float64 for float64): () or, with ``"none"``, (...).

    Of DTensors, rows stay where they are; a weight that is split is gathered. A reduced loss is on
    every process.
    """
    options = (ignore_index, label_smoothing, z_loss, reduction)
    if is_split((hidden, weight, targets)):
        return _loss_of_parts((hidden, weight, targets), options)
    run = implementation(_LINEAR_CROSS_ENTROPY, (hidden, weight, targets), options)
    try:
        result: Tensor = run(hidden, weight, targets, *options)
    except (IndexError, RuntimeError):
        check_classes("linear_cross_entropy", targets, weight.shape[0], ignore_index)
        raise
    return result


@overload
def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    ignore_index: int = -100,
    entropy: Literal[False] = False,
) -> Tensor: ...


@overload
def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    ignore_index: int = -100,
    entropy: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    ignore_index: int = -100,
    entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return ``log softmax(hidden @ weight.T / temperature)[token]`` without holding all logits.

    The logits are made again in the backward pass. The weight's gradient is summed in float32. It
    cannot be differentiated twice.

    Args:
        hidden: (..., H).
        weight: (V, H), dtype of hidden.
        tokens: (...) int64 or int32, from 0 to V - 1, or `ignore_index`.
        temperature: what logits are divided by; above 0.
        ignore_index: the token of a row that does not count; its results are 0.
        entropy: whether to return the entropies ``-Σ p log p`` of the rows as well, in nats.

    Returns:
        float32 (float64 for float64), (...); with `entropy` a pair of them. Both are
        differentiable.

    Of DTensors, rows stay where they are; a weight that is split is gathered.
    """
    options = (temperature, ignore_index, entropy)
    if is_split((hidden, weight, tokens)):
        _check("token_log_probs", (hidden, weight, tokens), options)
        names = ("hidden", "weight", "tokens")
        own: Any = partial(
            token_log_probs, temperature=temperature, ignore_index=ignore_index, entropy=entropy
        )
        found: Tensor | tuple[Tensor, Tensor]
        found = rows_mapped("token_log_probs", names, (hidden, weight, tokens), own)
        return found
    run = implementation(_TOKEN_LOG_PROBS, (hidden, weight, tokens), options)
    try:
        result: Tensor | tuple[Tensor, Tensor] = run(hidden, weight, tokens, *options)
    except (IndexError, RuntimeError):
        check_classes("token_log_probs", tokens, weight.shape[0], ignore_index, "tokens")
        raise
    return result


def permute_tokens(x: Tensor, experts: Tensor, *, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the rows of a mixture's tokens by the experts they chose, C each.

    Args:
        x: (T, H).
        experts: (T, C) int64 or int32, from 0 to count - 1. One out of range raises on the CPU; in
            kernels on an accelerator its row comes last and is counted for no expert.
        count: how many experts there are.

    Returns:
        rows (T·C, H), dtype of x: those of expert 0 first, in the order of their tokens; counts
        (count,) int64: how many rows each expert has; places (T, C) int64: the row of each choice.
        The first is differentiable; it is what `grouped_matmul` takes with the second, and the
        third leads `unpermute_tokens` back.

    Of DTensors, x may stay split over features, as its rows then are; tokens are gathered.
    """
    if is_split((x, experts)):
        _check("permute_tokens", (x, experts), (count,))
        own = partial(permute_tokens, count=count)
        rows, counts, places = permuted(("x", "experts"), (x, experts), own)
        return rows, counts, places
    run = implementation(_PERMUTE_TOKENS, (x, experts), (count,))
    try:
        result: tuple[Tensor, Tensor, Tensor] = run(x, experts, count)
    except (IndexError, RuntimeError):
        check_range("permute_tokens", "experts", experts, count)
        raise
    return result


def unpermute_tokens(rows: Tensor, places: Tensor, weights: Tensor | None = None) -> Tensor:
    """Lead rows back to their tokens: ``Σ_c weights[t, c] · rows[places[t, c]]``.

    Args:
        rows: (T·C, H).
        places: (T, C) int64 or int32, as `permute_tokens` gives them: each row once, which the CPU
            holds. On an accelerator a token with a place out of range is NaN, and of a row that no
            place or several name the gradient is not defined.
        weights: (T, C), a floating dtype; 1 if None.

    Returns:
        (T, H), dtype of rows.
    """
    run = implementation(_UNPERMUTE_TOKENS, (rows, places, weights), ())
    check_places(places, rows.shape[0])
    result: Tensor = run(rows, places, weights)
    return result


def grouped_matmul(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Multiply consecutive rows by their expert's matrix.

    Args:
        x: (T, K), the rows of expert 0 first.
        weights: (E, K, N), dtype of x.
        counts: (E,) int64 or int32, how many rows each expert has, 0 allowed; their sum is T, which
            the CPU holds. In kernels on an accelerator a row beyond their sum is NaN.

    Returns:
        (T, N), dtype of x.
    """
    run = implementation(_GROUPED_MATMUL, (x, weights, counts), ())
    try:
        result: Tensor = run(x, weights, counts)
    except (IndexError, RuntimeError):
        check_counts(counts, x.shape[0])
        raise
    return result


def quantized_linear(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    *,
    bits: Literal[4, 8],
    group_size: int,
) -> Tensor:
    """Return ``x @ weight.T``, the weight (N, K) packed as `ms_kernels.packed_weights` says.

    Args:
        x: (..., K).
        packed: (N, K · bits / 8) uint8.
        scales: (N, K / group_size), a floating dtype.
        zeros: likewise, dtype of scales; ``2 ** (bits - 1)`` if None.
        bits: 4 or 8.
        group_size: how many weights of a row share a scale.

    Returns:
        (..., N), dtype of x. It has a gradient with respect to x alone.
    """
    options = (bits, group_size)
    run = implementation(_QUANTIZED_LINEAR, (x, packed, scales, zeros), options)
    result: Tensor = run(x, packed, scales, zeros, *options)
    return result


def adamw_step(
    weights: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    *,
    step: int,
    learning_rate: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> None:
    """Take one step of AdamW in place (arXiv 1711.05101), as `torch.optim.AdamW` does.

    Args:
        weights: (...), written.
        gradient: (...), a floating dtype.
        mean: (...) float32 (or float64), the running mean of gradients; written.
        square: likewise, of their squares; written.
        step: 1 at the first step.
        learning_rate: of this step.
        betas: how much of mean and square stays.
        eps: added to the root of the square.
        weight_decay: share of the weights, times the learning rate, that is taken away.

    Each tensor has memory of its own: two that share a byte are refused, on every device; while
    torch.compile traces, only one that is given twice. DTensors that are split alike are stepped in
    place, each process its own part.
    """
    tensors = _own_parts("adamw_step", _ADAMW_STEP, (weights, gradient, mean, square))
    options = (step, learning_rate, betas, eps, weight_decay)
    run = implementation(_ADAMW_STEP, tensors, options)
    check_overlaps(_ADAMW_STEP, tensors)
    run(*tensors, *options)


def _check(operator: str, tensors: tuple[Tensor, ...], options: tuple[Any, ...]) -> None:
    """Refuse what does not fit the contract, before it falls into parts."""
    contract = CONTRACTS[operator]
    contract.bind(describe_call(contract, tensors, options))


def _loss_of_parts(tensors: tuple[Tensor, ...], options: tuple[Any, ...]) -> Tensor:
    """Return `linear_cross_entropy` of DTensors: each process's rows, then a sum over processes."""
    _check("linear_cross_entropy", tensors, options)
    ignore_index, label_smoothing, z_loss, reduction = options
    names = ("hidden", "weight", "targets")
    own = partial(
        linear_cross_entropy,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        reduction="none" if reduction == "none" else "sum",
    )
    if reduction == "none":
        losses: Tensor = rows_mapped("linear_cross_entropy", names, tensors, own)
        return losses
    counted = None
    if reduction == "mean":
        counted = partial(_count, ignore_index=ignore_index)
    return rows_reduced("linear_cross_entropy", names, tensors, own, mean_over=counted)


def _count(targets: Tensor, *, ignore_index: int) -> Tensor:
    return (targets != ignore_index).sum()


def _own_parts(
    operator: str, contract: Contract, tensors: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Return what this process holds of DTensors that are split alike; others as they are."""
    first = getattr(tensors[0], "placements", None)
    if first is None:
        return tensors
    for argument, tensor in zip(contract.arguments, tensors, strict=True):
        placed = getattr(tensor, "placements", None)
        if placed != first or any(each.is_partial() for each in placed):
            fits = f"split over processes as {contract.arguments[0].name} is: {first}, no sum"
            raise ArgumentError(operator, argument.name, f"placed as {placed}", fits)
    with torch.no_grad():
        return tuple(tensor.to_local() for tensor in tensors)  # type: ignore[attr-defined]
