"""Attention function for transformers' models that masks across packed documents."""

import inspect
import sys
from collections.abc import Hashable
from functools import cache
from typing import Any, cast

from torch import Tensor, nn

from ms_parallel.errors import ModelError
from ms_parallel.models.huggingface.config import transformers
from ms_parallel.operators.capped import capped_attention
from ms_parallel.operators.protocol import Ops

_NAME = "ms_parallel"
TABLE = "ALL_ATTENTION_FUNCTIONS"
"""Name of the registry in which transformers' models look up their attention function."""
WINDOWS = "create_sliding_window_causal_mask"
"""Name of the function that builds their sliding-window masks."""
UNSET: Any = object()
IGNORED_ARGUMENTS = frozenset(
    {
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "dropout",  # never applied here
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",  # already applied to queries and keys
        "seq_idx",
        "use_cache",
    }
)
"""Keyword arguments of an attention call that do not change its result here."""
_calls = 0


def call_count() -> int:
    """Number of attention calls since import; the difference shows whether a block called it."""
    return _calls


def uses_attention_interface(module: nn.Module) -> bool:
    """Whether a module's forward reads the registry that has our attention function."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and TABLE in code.co_names


def window_of(module: Any) -> int | None:
    """Window that a model applies only through its mask, which we do not use; else None."""
    settings = module.config
    window: int | None = getattr(settings, "sliding_window", None)
    if not hasattr(sys.modules[type(module).__module__], WINDOWS):
        return None
    kinds = getattr(settings, "layer_types", None)
    slides = kinds is None or kinds[module.layer_idx] == "sliding_attention"
    return window if slides else None


@cache
def registered(ops: Hashable) -> str:
    """Register attention that uses `ops` with transformers; return the registered name.

    The `attention_mask` argument carries the document numbers (B, keys) int32 instead, or None.
    """
    attention = cast(Ops, ops).attention

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        sliding_window: Any = UNSET,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        is_causal: bool | None = None,
        **extra: Any,
    ) -> tuple[Tensor, None]:
        """Map queries, keys and values (B, heads, S, D) to (B, S, heads, D).

        Raises:
            ModelError: the model passes an argument that changes the result in an unknown way.
        """
        global _calls
        # Counted, so that a block which bypasses the registry is detected.
        _calls += 1
        for name, argument in extra.items():
            if argument is not None and name not in IGNORED_ARGUMENTS:
                raise ModelError(
                    f"{type(module).__name__} passes {name!r} to its attention, which is not"
                    " supported; train this model with transformers"
                )
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if not causal:
            raise ModelError(
                f"{type(module).__name__} must be causal for next-token training, but its attention"
                " is bidirectional"
            )
        if attention_mask is not None and attention_mask.ndim != 2:
            raise ModelError(
                f"{type(module).__name__} builds its own attention mask, which is not supported;"
                " train this model with transformers"
            )
        # Rotary tables in float32 promote queries and keys to float32, but not values.
        # (B, heads, S, D) -> (B, S, heads, D), the layout of our operators.
        q, k, v = (x.to(value.dtype).transpose(1, 2) for x in (query, key, value))
        options: dict[str, Any] = {
            "documents": attention_mask,
            "window": window_of(module) if sliding_window is UNSET else sliding_window,
            "scale": scaling,
        }
        if softcap is None:
            sinks: dict[str, Any] = {} if s_aux is None else {"sinks": s_aux}
            # transformers' forwards view the result, and an operator may return any memory layout.
            return attention(q, k, v, **options, **sinks).contiguous(), None
        if s_aux is not None:
            raise ModelError("attention with both a score softcap and sinks is not supported")
        return capped_attention(q, k, v, softcap=softcap, **options), None

    name = f"{_NAME}.{id(ops)}"  # the cache keeps `ops` alive, so the id stays unique
    transformers().AttentionInterface.register(name, attend)
    return name
