"""Attention of this package as the implementation "ms_kernels" of transformers' models.

transformers calls two registered functions: one builds the mask of a forward pass, the other
computes attention in each layer. The mask function describes causal, sliding-window, packed and
padded masks by the document of each position, so no (B, 1, Sq, Sk) mask is built for them. Other
masks are built as for SDPA, and their layers run SDPA, as do windows and packed rows under
torch.compile.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ms_kernels.errors import ArgumentError, shown
from ms_kernels.operators.attention.contract import visible
from ms_kernels.operators.attention.operator import attention

NAME = "ms_kernels"
"""Name of the implementation, for `attn_implementation=`."""

MASK_KINDS = {
    "causal_mask_function": "causal",
    "and_masks.<locals>.and_mask": "and",
    "sliding_window_overlay.<locals>.inner_mask": "window",
    "packed_sequence_mask_function.<locals>.inner_mask": "documents",
    "remap_positions_for_packed_sequence.<locals>.inner_mask": "renumbered",
}
"""Mask functions of transformers.masking_utils by qualified name; each captures one variable."""


class DocumentMask(NamedTuple):
    """Document ids and window that replace a dense causal mask."""

    documents: Tensor | None
    """Document of each key position, (B, Sk) int32 or int64; None if all are of one document."""
    window: int | None
    """A query sees positions at a distance below it; None for no limit."""


def register_attention() -> None:
    """Register ``attn_implementation="ms_kernels"`` with transformers; repeated calls are harmless.

    Raises:
        ImportError: transformers is not installed.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _make_mask)


def _make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> DocumentMask | Tensor | None:
    """Describe the mask of a forward pass. The parameters are those of transformers.

    `attention_mask` is (B, Sk), 0 at padding, or None.
    """
    from transformers.masking_utils import sdpa_mask

    parts = None if mask_function is None else _parts_of(mask_function)
    # Queries must be the last positions; in a static cache, empty positions follow them.
    at_end = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    if parts is None or not at_end:
        build: Callable[..., Tensor | None] = sdpa_mask
        options["allow_is_causal_skip"] = False  # without a mask, `_attend` aligns at the end
        return build(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **options,
        )
    documents = parts.documents
    if attention_mask is not None:
        is_text = attention_mask[:, kv_offset : kv_offset + kv_length].to(torch.bool)
        padding = torch.full((), -1, dtype=torch.int32, device=is_text.device)
        # Padding becomes a separate document, which no token attends to.
        documents = torch.where(is_text, 0 if documents is None else documents, padding)
        documents = documents.to(torch.int32)
    return DocumentMask(documents, parts.window)


def _parts_of(mask_function: Callable[..., Any]) -> DocumentMask | None:
    """Return documents and window of a mask function; None if it has an unknown condition.

    transformers builds a mask by nesting functions. Masks that use functions not in `MASK_KINDS`,
    such as bidirectional blocks of image tokens, stay dense.
    """
    documents, window, is_causal = None, None, False
    pending = [mask_function]
    while pending:
        condition = pending.pop()
        kind = MASK_KINDS.get(condition.__code__.co_qualname)  # dynamo can trace the code object
        if kind != "causal" and torch.compiler.is_compiling():
            return None  # dynamo cannot read captured variables
        values = [cell.cell_contents for cell in condition.__closure__ or ()]
        if kind == "causal":
            is_causal = True
        elif kind == "and":
            pending.extend(values[0])
        elif kind == "renumbered":  # renumbered per document, which preserves distances
            pending.append(values[0])
        elif kind == "window":
            window = int(values[0]) if window is None else min(window, int(values[0]))
        elif kind == "documents" and documents is None:
            documents = values[0]
        else:
            return None
    return DocumentMask(documents, window) if is_causal else None


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: DocumentMask | Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of a layer. The parameters are those of transformers.

    Queries are (B, Hq, Sq, D), keys (B, Hk, Sk, D), values (B, Hk, Sk, Dv). The result is
    (B, Sq, Hq, Dv), with None in place of the weights. Layers that cap scores or add a bias to them
    are not supported.
    """
    for name in ("softcap", "position_bias"):
        if options.get(name) is not None:
            raise ArgumentError("attention", name, shown(options[name]), "None in a patched model")
    queries = query.shape[2]
    if attention_mask is None:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        causal, mask = causal and queries > 1, DocumentMask(None, None)
    elif isinstance(attention_mask, DocumentMask):
        causal, mask = True, attention_mask
    else:
        return _attend_densely(module, query, key, value, attention_mask, scaling, dropout, options)
    if dropout:
        dense = visible(queries, key.shape[2], key.device, mask.documents, causal, mask.window)
        dense = None if dense is None else dense[:, None]
        return _attend_densely(module, query, key, value, dense, scaling, dropout, options)
    rows = (tensor.transpose(1, 2) for tensor in (query, key, value))
    sinks = options.get("s_aux")
    result = attention(
        *rows,
        causal=causal,
        documents=mask.documents,
        window=mask.window,
        scale=None if scaling is None else float(scaling),
        sinks=sinks,
    )
    return result, None


def _attend_densely(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    options: dict[str, Any],
) -> tuple[Tensor, None]:
    """Run SDPA with a dense mask, (B, 1, Sq, Sk) bool or additive."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if options.get("s_aux") is not None:
        raise ArgumentError("attention", "sinks", "given with a dense mask", "None for such a mask")
    result, _ = sdpa_attention_forward(
        module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=False
    )
    return result, None
