"""Common interface to causal language models: hidden states and the output head.

Three types of modules are supported and recognized by their attributes, not by their names:
staged models (`StagedInterface`: ms-parallel's decoders, and transformers models that it splits),
transformers models (`get_output_embeddings`), and any other module that maps tokens (B, S) to
logits (B, S, V). Shapes: B rows, S positions, H hidden, V vocabulary.
"""

import copy
import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ms_align.errors import DataError, ModelError

TOLERANCE = 1e-4
"""Maximum difference of logits from the model's own, relative to the largest logit."""

WINDOW_IN_ALL_LAYERS = frozenset({"mistral", "mixtral", "phi3", "starcoder2"})
"""Model types of transformers with a single mask, and a window in all layers or none."""
WINDOW_BY_LAYER = frozenset({"gemma2", "gemma3_text", "qwen2", "qwen3"})
"""Model types with a separate mask for each of their `layer_types`."""


class StagedInterface(Protocol):
    """Interface of ms-parallel's models, such as `ms_parallel.models.Decoder`.

    A class implements it if `head_weight` is a property; this is never so in transformers.
    """

    @property
    def config(self) -> Any:
        """Configuration with `hidden_size` and `vocab_size`."""

    @property
    def head_weight(self) -> Tensor:
        """Weight of the output head, (V, H)."""

    def head(self, hidden: Tensor, /) -> Tensor:
        """Project final hidden states (..., H) to logits (..., V)."""

    def __call__(self, tokens: Tensor, **arguments: Any) -> Tensor:
        """Accept `positions`, `documents`, `cache`, and `logits=False` to get hidden states."""


class LanguageModel(Protocol):
    """Interface of engines and generators to a model."""

    @property
    def module(self) -> nn.Module:
        """The model itself."""

    @property
    def hidden_size(self) -> int | None:
        """Hidden size; None if the model does not expose hidden states."""

    @property
    def vocabulary_size(self) -> int | None:
        """Vocabulary size; None if unknown."""

    @property
    def context(self) -> int | None:
        """Maximum number of positions; None if unknown."""

    @property
    def head_weight(self) -> Tensor | None:
        """Weight (V, H) if `project` is only a product with it; else None."""

    def hidden(self, tokens: Tensor, positions: Tensor | None, documents: Tensor | None) -> Tensor:
        """Compute final hidden states (B, S, H), or logits (B, S, V) if hidden_size is None."""

    def project(self, hidden: Tensor) -> Tensor:
        """Project hidden states (..., H) to logits (..., V)."""


def check_tokens(
    token_ids: Tensor, vocabulary: int | None, name: str, *, ignored: int | None = None
) -> None:
    """Check that token ids are in the vocabulary, as embeddings do not check bounds.

    Args:
        token_ids: (..., S); not checked on an accelerator, as that would synchronize.
        vocabulary: vocabulary size; None skips the check.
        name: name of the tensor, for messages.
        ignored: allowed value outside the vocabulary, such as -100.

    Raises:
        DataError: an id is negative or not below the vocabulary size.
    """
    if vocabulary is None or token_ids.device.type != "cpu" or not token_ids.numel():
        return
    if token_ids.is_floating_point() or (token_ids.amin() >= 0 and token_ids.amax() < vocabulary):
        return
    # Only ids outside the vocabulary, which `ignored` may explain, get here.
    invalid = token_ids[((token_ids < 0) | (token_ids >= vocabulary))]
    invalid = invalid if ignored is None else invalid[invalid != ignored]
    if invalid.numel():
        raise DataError(
            f"{name} has token {int(invalid[0])} and the model's vocabulary is {vocabulary}; use "
            "the model's tokenizer"
        )


def copy_of(module: nn.Module) -> nn.Module:
    """Copy a module and its weights; Python modules that it refers to are not copied."""
    # Python modules cannot be copied; deepcopy keeps objects that are in its memo.
    shared: dict[int, Any] = {
        id(value): value
        for part in module.modules()
        for value in vars(part).values()
        if isinstance(value, ModuleType)
    }
    return copy.deepcopy(module, shared)


def language_model(module: nn.Module) -> LanguageModel:
    """Wrap a module in the common interface.

    Raises:
        ModelError: the module has none of the supported types.
    """
    untyped: Any = module
    base = untyped.get_base_model() if hasattr(module, "get_base_model") else module
    if isinstance(getattr(type(base), "head_weight", None), property):
        return StagedLanguageModel(module)
    if hasattr(module, "get_output_embeddings") or hasattr(module, "get_base_model"):
        return HuggingFaceModel(module)
    if isinstance(module, nn.Module):
        return PlainModel(module)
    raise ModelError(
        f"the model must be a torch.nn.Module, got {type(module).__name__}; pass a module"
    )


class StagedLanguageModel:
    """Model of ms-parallel, which can return hidden states without the head."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._staged = cast(StagedInterface, module)
        config = self._staged.config
        self._plain_head = getattr(module, "plain_head", True)
        """True if logits are the product with `head_weight`, before any soft cap."""
        self.hidden_size: int | None = config.hidden_size
        self.vocabulary_size: int | None = config.vocab_size
        self.context: int | None = getattr(config, "max_position_embeddings", None)

    @property
    def head_weight(self) -> Tensor | None:
        """Weight (V, H); None if logits are more than a product with it."""
        capped = getattr(self._staged.config, "final_softcap", None) is not None
        return self._staged.head_weight if self._plain_head and not capped else None

    def hidden(self, tokens: Tensor, positions: Tensor | None, documents: Tensor | None) -> Tensor:
        """Compute the final hidden states (B, S, H)."""
        return self._staged(tokens, positions=positions, documents=documents, logits=False)

    def project(self, hidden: Tensor) -> Tensor:
        """Project hidden states (..., H) to logits (..., V)."""
        weight = self.head_weight
        if weight is None:
            logits = self._staged.head(hidden.reshape(1, -1, hidden.shape[-1]))
            return logits.view(*hidden.shape[:-1], -1)
        return F.linear(hidden, weight)


class HuggingFaceModel:
    """Causal language model of transformers, possibly wrapped by peft."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        untyped: Any = module
        self._inner: Any = (
            untyped.get_base_model() if hasattr(module, "get_base_model") else untyped
        )
        config = self._inner.config.get_text_config()
        self.vocabulary_size: int | None = config.vocab_size
        self.hidden_size: int | None = config.hidden_size
        self.context: int | None = getattr(config, "max_position_embeddings", None)
        body = self._inner.base_model
        names = inspect.signature(body.forward).parameters
        # transformers 5.2x renamed the argument and plans to remove the old name in 5.40.
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._returns_logits = not self._head_is_linear()
        if self._returns_logits:
            self.hidden_size = None

    @torch.no_grad()
    def _head_is_linear(self) -> bool:
        """Return True if logits are exactly the output embedding applied to the hidden states."""
        head = self._inner.get_output_embeddings()
        if head is None or self._inner.base_model is self._inner:
            return False
        if getattr(self._inner.config.get_text_config(), "final_logit_softcapping", None):
            return False  # the comparison below cannot detect a cap on small logits
        # Compare the logits of a short forward pass with the head applied to its hidden states.
        tokens = torch.arange(4, device=head.weight.device)[None] % max(
            self.vocabulary_size or 1, 1
        )
        # Dropout would make the results differ.
        training = self._inner.training
        self._inner.eval()
        expected = self._inner(input_ids=tokens, use_cache=False).logits.float()
        body = self._inner.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        projected = head(body).float()
        self._inner.train(training)
        same_shape = expected.shape == projected.shape
        return same_shape and bool(
            (expected - projected).abs().max() <= TOLERANCE * expected.abs().max()
        )

    @property
    def head_weight(self) -> Tensor | None:
        """Weight (V, H) if the head is a plain nn.Linear without bias and hooks."""
        if self._returns_logits:
            return None
        head: Any = self._inner.get_output_embeddings()
        plain = type(head) is nn.Linear and head.bias is None
        hooked = plain and bool(head._forward_hooks or head._forward_pre_hooks)
        return cast(Tensor, head.weight) if plain and not hooked else None

    def hidden(self, tokens: Tensor, positions: Tensor | None, documents: Tensor | None) -> Tensor:
        """Compute final hidden states (B, S, H), or logits if the head is not just a product."""
        arguments: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        arguments["position_ids"] = positions
        if documents is not None and _is_alibi(self._inner):
            # ALiBi biases cannot express documents, so each one becomes a row.
            rows, index = _unpack_documents(tokens, documents)
            return self.hidden(rows, None, None)[index]
        # An explicit mask, as the handling of restarting positions differs between versions.
        if documents is not None:
            causal = torch.ones(2 * tokens.shape[1:], dtype=torch.bool, device=tokens.device).tril()
            visible = (documents[:, :, None] == documents[:, None, :]) & causal  # (B, S, S)
            arguments["attention_mask"] = attention_masks(self._inner, visible)
        return self._run(arguments)

    def _run(self, arguments: Mapping[str, Any]) -> Tensor:
        if self._returns_logits:
            return cast(Tensor, self._inner(**arguments).logits)
        return cast(Tensor, self._inner.base_model(**arguments).last_hidden_state)

    def cached(
        self, tokens: Tensor, positions: Tensor, visible: Tensor | None, cache: object
    ) -> Tensor:
        """Compute the same as `hidden`, after W positions in a transformers cache.

        `visible` (B, S, W + S) is the attention mask; None for causal attention.
        """
        arguments: dict[str, Any] = {
            "input_ids": tokens,
            "position_ids": positions,
            "attention_mask": self._cached_mask(visible),
            self._cache_name: cache,
            "use_cache": True,
        }
        return self._run(arguments)

    def _cached_mask(self, visible: Tensor | None) -> Tensor | dict[str, Tensor] | None:
        if visible is None:
            return None
        # With one new token, its row of the mask is the padding mask (B, W + 1).
        if _is_alibi(self._inner) and visible.shape[1] == 1:
            return visible[:, 0].long()
        return attention_masks(self._inner, visible)

    def project(self, hidden: Tensor) -> Tensor:
        """Project hidden states (..., H) to logits (..., V)."""
        return (
            hidden
            if self._returns_logits
            else cast(Tensor, self._inner.get_output_embeddings()(hidden))
        )


def _is_alibi(inner: Any) -> bool:
    """Return True for ALiBi models, which compute distances from a padding mask (B, W)."""
    return inner.config.model_type == "bloom" or bool(getattr(inner.config, "alibi", False))


def _unpack_documents(tokens: Tensor, documents: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Unpack rows (B, S) to one right-padded row per document, with the index of each position."""
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    # Row number of each position's document, and its position in the document.
    row = starts.flatten().cumsum(0).view(documents.shape) - 1
    columns = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    first = torch.where(starts, columns, 0).cummax(1).values  # start of each document
    index = row, columns - first
    unpacked = tokens.new_zeros(int(row.max()) + 1, int(index[1].max()) + 1)
    unpacked[index] = tokens
    return unpacked, index


def attention_masks(inner: Any, visible: Tensor) -> Tensor | dict[str, Tensor]:
    """Build the mask argument of a transformers model for the last S of W columns.

    Args:
        inner: the model; with an explicit mask, sliding windows must be part of it.
        visible: (B, S, W) bool, attention without windows.

    Returns:
        Additive mask (B, 1, S, W), with the dtype's minimum at hidden positions; one mask per
        layer type if only some layers have a window.

    Raises:
        ModelError: the model has a window and its mask format is unknown.
    """
    dtype = next(inner.parameters()).dtype

    def additive(visible: Tensor) -> Tensor:
        mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        # Not -inf, as softmax of a row without visible columns would be NaN.
        return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]

    window = _window(inner)
    # Such a window hides nothing.
    if window is None or window >= visible.shape[2]:
        return additive(visible)
    ones = torch.ones(visible.shape[1:], dtype=torch.bool, device=visible.device)
    # The window ends at the diagonal, which is shifted by the W - S cached columns.
    windowed = additive(visible & ones.triu(visible.shape[2] - visible.shape[1] - window + 1))
    if inner.config.model_type in WINDOW_IN_ALL_LAYERS:
        return windowed
    return {"full_attention": additive(visible), "sliding_attention": windowed}


def _window(inner: Any) -> int | None:
    """Return the number of columns in a layer's window, including itself; None if unlimited."""
    config, model_type = inner.config.get_text_config(), inner.config.model_type
    layer_types = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    window: int | None = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    if model_type in WINDOW_IN_ALL_LAYERS or (model_type in WINDOW_BY_LAYER and layer_types):
        return window
    context = getattr(config, "max_position_embeddings", None)
    # A window as long as the context has no effect.
    if layer_types - {"sliding_attention"} or (window and (context is None or window < context)):
        raise ModelError(
            f"{type(inner).__name__} ({model_type}) has sliding windows in a mask format that is "
            "not supported; for packed rows and generation use a model of "
            f"{', '.join(sorted(WINDOW_IN_ALL_LAYERS | WINDOW_BY_LAYER))}, or one without windows"
        )
    return None


class PlainModel:
    """Any module that maps tokens to logits, without access to hidden states."""

    hidden_size: int | None = None
    vocabulary_size: int | None = None
    context: int | None = None
    head_weight: Tensor | None = None

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        names = inspect.signature(module.forward).parameters
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in names.values())
        self._takes = {name for name in ("positions", "documents") if takes_any or name in names}

    def hidden(self, tokens: Tensor, positions: Tensor | None, documents: Tensor | None) -> Tensor:
        """Compute the logits (B, S, V).

        Raises:
            ModelError: rows are packed and the module does not accept `documents`.
        """
        available: Mapping[str, Tensor | None] = {"positions": positions, "documents": documents}
        if documents is not None and "documents" not in self._takes:
            raise ModelError(
                f"{type(self.module).__name__}.forward must accept `documents` for packed rows, or "
                "they would attend to each other; add that argument, or do not pack"
            )
        arguments = {name: available[name] for name in self._takes}
        return cast(Tensor, self.module(tokens, **arguments))

    def project(self, hidden: Tensor) -> Tensor:
        """Return the logits unchanged."""
        return hidden
