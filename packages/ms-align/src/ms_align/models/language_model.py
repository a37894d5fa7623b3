"""One interface to every causal language model: hidden states, and the head behind them.

Three kinds of module are understood, recognised by what their class offers, never by name alone:
a model of the seam (`StagedFace`: ms-parallel's decoders, and what it builds with transformers), a
transformers model (`get_output_embeddings`), and any module that
maps tokens (B, S) to logits (B, S, V). Shapes: B rows, S positions, H hidden, V vocabulary.
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

AGREE = 1e-4
"""How far logits from hidden states may lie from a model's own, relative to the largest."""

WINDOW_IN_ALL_LAYERS = frozenset({"mistral", "mixtral", "phi3", "starcoder2"})
"""Kinds of transformers that take one mask for all layers, and have a window in each or none."""
WINDOW_BY_LAYER = frozenset({"gemma2", "gemma3_text", "qwen2", "qwen3"})
"""Kinds that take a mask for each of their `layer_types`."""


class StagedFace(Protocol):
    """A model of the seam, such as `ms_parallel.models.Decoder`.

    A class is one if it has `head_weight` as a property; a model of transformers never has.
    """

    @property
    def config(self) -> Any:
        """Has `hidden_size` and `vocab_size`."""

    @property
    def head_weight(self) -> Tensor:
        """(V, H)."""

    def head(self, hidden: Tensor, /) -> Tensor:
        """Project finished hidden states (..., H) to logits (..., V)."""

    def __call__(self, tokens: Tensor, **arguments: Any) -> Tensor:
        """Take `positions`, `documents`, `cache`, and `logits=False` for hidden states alone."""


class LanguageModel(Protocol):
    """What the engine and the generator ask of a model."""

    @property
    def module(self) -> nn.Module:
        """The model itself."""

    @property
    def hidden_size(self) -> int | None:
        """Width of a hidden state; None where the model shows none."""

    @property
    def vocabulary_size(self) -> int | None:
        """Tokens that there are; None where the model does not say."""

    @property
    def context(self) -> int | None:
        """Most positions that it can take; None where the model does not say."""

    @property
    def head_weight(self) -> Tensor | None:
        """(V, H), where `project` is a product with it and nothing more; else None."""

    def hidden(self, tokens: Tensor, positions: Tensor | None, documents: Tensor | None) -> Tensor:
        """Compute final hidden states (B, S, H), or logits (B, S, V) where the model shows none."""

    def project(self, hidden: Tensor) -> Tensor:
        """Project hidden states (..., H) to logits (..., V)."""


def check_tokens(
    numbers: Tensor, vocabulary: int | None, name: str, *, ignored: int | None = None
) -> None:
    """Refuse what is no token of a vocabulary, which an embedding would follow out of its weight.

    Args:
        numbers: (..., S); those of an accelerator are not looked at, as that would wait for it.
        vocabulary: tokens that there are; None where the model does not say.
        name: of the numbers, for the message.
        ignored: a number that is none on purpose.

    Raises:
        DataError: one is below 0, or not below the vocabulary.
    """
    if vocabulary is None or numbers.device.type != "cpu" or not numbers.numel():
        return
    if numbers.is_floating_point() or (numbers.amin() >= 0 and numbers.amax() < vocabulary):
        return
    foreign = numbers[((numbers < 0) | (numbers >= vocabulary))]
    foreign = foreign if ignored is None else foreign[foreign != ignored]
    if foreign.numel():
        raise DataError(
            f"{name} has token {int(foreign[0])} and the model's vocabulary is {vocabulary}; the "
            "tokenizer is of another model"
        )


def copy_of(module: nn.Module) -> nn.Module:
    """Copy a module, sharing no weight; operators that are Python modules stay as they are."""
    shared: dict[int, Any] = {
        id(value): value
        for part in module.modules()
        for value in vars(part).values()
        if isinstance(value, ModuleType)
    }
    return copy.deepcopy(module, shared)


def language_model(module: nn.Module) -> LanguageModel:
    """Find the interface to a model.

    Raises:
        ModelError: it is none of the kinds that are understood.
    """
    given: Any = module
    inner = given.get_base_model() if hasattr(module, "get_base_model") else module
    if isinstance(getattr(type(inner), "head_weight", None), property):
        return SeamModel(module)
    if hasattr(module, "get_output_embeddings") or hasattr(module, "get_base_model"):
        return HuggingFaceModel(module)
    if isinstance(module, nn.Module):
        return PlainModel(module)
    raise ModelError(f"{type(module).__name__} is no torch.nn.Module; give a model")


class SeamModel:
    """A model of the seam that can leave out its head."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._face = cast(StagedFace, module)
        config = self._face.config
        self._plain_head = getattr(module, "plain_head", True)
        """Whether logits are the product with `head_weight`, before any soft cap."""
        self.hidden_size: int | None = config.hidden_size
        self.vocabulary_size: int | None = config.vocab_size
        self.context: int | None = getattr(config, "max_position_embeddings", None)

    @property
    def head_weight(self) -> Tensor | None:
        """(V, H); None where logits are more than a product with it."""
        capped = getattr(self._face.config, "final_softcap", None) is not None
        return self._face.head_weight if self._plain_head and not capped else None

    def hidden(self, tokens: Tensor, positions: Tensor | None, documents: Tensor | None) -> Tensor:
        """Compute the final hidden states (B, S, H)."""
        return self._face(tokens, positions=positions, documents=documents, logits=False)

    def project(self, hidden: Tensor) -> Tensor:
        """Project hidden states (..., H) to logits (..., V)."""
        weight = self.head_weight
        if weight is None:
            logits = self._face.head(hidden.reshape(1, -1, hidden.shape[-1]))
            return logits.view(*hidden.shape[:-1], -1)
        return F.linear(hidden, weight)


class HuggingFaceModel:
    """A causal language model of transformers, also one wrapped by peft."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        own: Any = module
        self._inner: Any = own.get_base_model() if hasattr(module, "get_base_model") else own
        config = self._inner.config.get_text_config()
        self.vocabulary_size: int | None = config.vocab_size
        self.hidden_size: int | None = config.hidden_size
        self.context: int | None = getattr(config, "max_position_embeddings", None)
        body = self._inner.base_model
        names = inspect.signature(body.forward).parameters
        # Renamed in transformers 5.2x; the old name is to be removed in 5.40.
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._whole = not self._head_is_all()
        if self._whole:
            self.hidden_size = None

    @torch.no_grad()
    def _head_is_all(self) -> bool:
        """Return whether logits are the output embedding of the hidden states and nothing more."""
        head = self._inner.get_output_embeddings()
        if head is None or self._inner.base_model is self._inner:
            return False
        if getattr(self._inner.config.get_text_config(), "final_logit_softcapping", None):
            return False  # near 0, where a model may begin, a cap shows nothing
        tokens = torch.arange(4, device=head.weight.device)[None] % max(
            self.vocabulary_size or 1, 1
        )
        training = self._inner.training
        self._inner.eval()
        own = self._inner(input_ids=tokens, use_cache=False).logits.float()
        body = self._inner.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        made = head(body).float()
        self._inner.train(training)
        same_shape = own.shape == made.shape
        return same_shape and bool((own - made).abs().max() <= AGREE * own.abs().max())

    @property
    def head_weight(self) -> Tensor | None:
        """(V, H), where the head is a plain nn.Linear without a bias or a hook."""
        if self._whole:
            return None
        head: Any = self._inner.get_output_embeddings()
        plain = type(head) is nn.Linear and head.bias is None
        hooked = plain and bool(head._forward_hooks or head._forward_pre_hooks)
        return cast(Tensor, head.weight) if plain and not hooked else None

    def hidden(self, tokens: Tensor, positions: Tensor | None, documents: Tensor | None) -> Tensor:
        """Compute final hidden states (B, S, H); logits where the head does more than multiply."""
        arguments: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        arguments["position_ids"] = positions
        if documents is not None and _is_alibi(self._inner):
            rows, at = _documents_apart(tokens, documents)
            return self.hidden(rows, None, None)[at]
        # An explicit mask, for what a model makes of positions that restart differs by version.
        if documents is not None:
            causal = torch.ones(2 * tokens.shape[1:], dtype=torch.bool, device=tokens.device).tril()
            seen = (documents[:, :, None] == documents[:, None, :]) & causal
            arguments["attention_mask"] = attention_masks(self._inner, seen)
        return self._run(arguments)

    def _run(self, arguments: Mapping[str, Any]) -> Tensor:
        if self._whole:
            return cast(Tensor, self._inner(**arguments).logits)
        return cast(Tensor, self._inner.base_model(**arguments).last_hidden_state)

    def cached(
        self, tokens: Tensor, positions: Tensor, seen: Tensor | None, cache: object
    ) -> Tensor:
        """Compute what `hidden` does, behind the W positions that a cache of transformers holds.

        `seen` (B, S, W + S) says which positions each one sees; None for itself and all before it.
        """
        arguments: dict[str, Any] = {
            "input_ids": tokens,
            "position_ids": positions,
            "attention_mask": self._mask_behind(seen),
            self._cache_name: cache,
            "use_cache": True,
        }
        return self._run(arguments)

    def _mask_behind(self, seen: Tensor | None) -> Tensor | dict[str, Tensor] | None:
        if seen is None:
            return None
        if _is_alibi(self._inner) and seen.shape[1] == 1:
            return seen[:, 0].long()
        return attention_masks(self._inner, seen)

    def project(self, hidden: Tensor) -> Tensor:
        """Project hidden states (..., H) to logits (..., V)."""
        return hidden if self._whole else cast(Tensor, self._inner.get_output_embeddings()(hidden))


def _is_alibi(inner: Any) -> bool:
    """Return whether it biases attention by distance, which it counts from a mask (B, W) alone."""
    return inner.config.model_type == "bloom" or bool(getattr(inner.config, "alibi", False))


def _documents_apart(tokens: Tensor, documents: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Unpack rows (B, S) to a row a document, padded behind, and tell where each position went."""
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    row = begins.flatten().cumsum(0).view(documents.shape) - 1
    columns = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    first = torch.where(begins, columns, 0).cummax(1).values
    at = row, columns - first
    apart = tokens.new_zeros(int(row.max()) + 1, int(at[1].max()) + 1)
    apart[at] = tokens
    return apart, at


def attention_masks(inner: Any, seen: Tensor) -> Tensor | dict[str, Tensor]:
    """Build what a transformers model takes for the last S of W columns, which lie in their order.

    Args:
        inner: the model; with a mask of ours it leaves its sliding window to us.
        seen: (B, S, W) bool, which columns each sees, were there no window.

    Returns:
        0 where it sees and the least number elsewhere, (B, 1, S, W); of each kind of layer where
        some have a window and others not.

    Raises:
        ModelError: it has a window, and how it takes a mask is not known.
    """
    dtype = next(inner.parameters()).dtype

    def mask_of(seen: Tensor) -> Tensor:
        mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        return mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]

    window = _window(inner)
    if window is None or window >= seen.shape[2]:
        return mask_of(seen)
    ones = torch.ones(seen.shape[1:], dtype=torch.bool, device=seen.device)
    near = mask_of(seen & ones.triu(seen.shape[2] - seen.shape[1] - window + 1))
    if inner.config.model_type in WINDOW_IN_ALL_LAYERS:
        return near
    return {"full_attention": mask_of(seen), "sliding_attention": near}


def _window(inner: Any) -> int | None:
    """Find how many columns a layer with a window sees at most, with itself; None without one."""
    config, kind = inner.config.get_text_config(), inner.config.model_type
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    window: int | None = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    if kind in WINDOW_IN_ALL_LAYERS or (kind in WINDOW_BY_LAYER and kinds):
        return window
    context = getattr(config, "max_position_embeddings", None)
    if kinds - {"sliding_attention"} or (window and (context is None or window < context)):
        raise ModelError(
            f"{type(inner).__name__} ({kind}) has layers that see a window, and how it takes a "
            "mask for them is not known; for rows that are packed and for generation give a model "
            f"of {', '.join(sorted(WINDOW_IN_ALL_LAYERS | WINDOW_BY_LAYER))}, or one without"
        )
    return None


class PlainModel:
    """Any module that maps tokens to logits; it shows no hidden states."""

    hidden_size: int | None = None
    vocabulary_size: int | None = None
    context: int | None = None
    head_weight: Tensor | None = None

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        names = inspect.signature(module.forward).parameters
        every = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in names.values())
        self._takes = {name for name in ("positions", "documents") if every or name in names}

    def hidden(self, tokens: Tensor, positions: Tensor | None, documents: Tensor | None) -> Tensor:
        """Compute the logits (B, S, V).

        Raises:
            ModelError: rows are packed or positions restart, and the module takes no such thing.
        """
        given: Mapping[str, Tensor | None] = {"positions": positions, "documents": documents}
        if documents is not None and "documents" not in self._takes:
            raise ModelError(
                f"{type(self.module).__name__}.forward takes no `documents`, so packed rows would "
                "leak into each other; add that argument, or don't pack"
            )
        arguments = {name: given[name] for name in self._takes}
        return cast(Tensor, self.module(tokens, **arguments))

    def project(self, hidden: Tensor) -> Tensor:
        """Return the logits as they are."""
        return hidden
