"""Prefill and decoding for any model, with the KV cache of `Columns`.

The model itself runs unchanged; only the cache passed to it is ours. Shapes: B rows, S positions,
H hidden, V vocabulary, Hk KV heads, D head dim.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ms_align.errors import ModelError
from ms_align.generation.columns import Columns
from ms_align.generation.static_batch import DecodeCache, StaticReader
from ms_align.models.language_model import (
    HuggingFaceModel,
    LanguageModel,
    PlainModel,
    StagedLanguageModel,
)

logger = logging.getLogger(__name__)
TOLERANCE, TOLERANCE_HALF = 1e-4, 3e-2
"""Maximum difference of cached from uncached logits, relative to the largest logit; the second for
half precision, which has 8 or 11 significant bits."""


class Reader(Protocol):
    """Interface of the generator to prefill and decoding."""

    def prefill(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Run prompts through the model.

        Args:
            tokens: (B, S) int64, padded on the right.
            lengths: (B,) int64.

        Returns:
            Logits (B, V) after each prompt's last token; keys and values per layer,
            (B, S, 2, Hk, D).
        """

    def step(self, tokens: Tensor, positions: Tensor, columns: Columns) -> Tensor:
        """Decode one token per row, (B,) at positions (B,); return logits (B, V)."""


def reader_of(model: LanguageModel) -> "ModelReader | RerunReader":
    """Build the reader of a model: with a KV cache if this gives the model's own logits.

    Raises:
        ModelError: the model is a plain module, whose cache interface is unknown.
    """
    if isinstance(model, PlainModel):
        raise ModelError(
            f"{type(model.module).__name__} does not support a KV cache, which generation needs; "
            "use a model of ms_parallel or transformers, or your own generator"
        )
    reader = ModelReader(model)
    if _has_recurrent_state(model) or not _matches(reader, model):
        name = type(model.module).__name__
        logger.warning(
            "%s has state other than keys and values; each new token runs its full row again, "
            "which is slow",
            name,
        )
        return RerunReader(model)
    return reader


def _has_recurrent_state(model: LanguageModel) -> bool:
    """Return True if layers have state other than keys and values, such as Mamba's."""
    module: Any = model.module
    if getattr(module, "replays", False) or getattr(module, "_is_stateful", False):
        return True
    config = getattr(module, "config", None)
    layer_types = (
        getattr(config, "layer_types", None) if isinstance(model, HuggingFaceModel) else None
    )
    return any(
        "attention" not in layer_type or "linear" in layer_type for layer_type in layer_types or ()
    )


@torch.no_grad()
def _matches(reader: "ModelReader", model: LanguageModel) -> bool:
    """Return True if 3 tokens plus 1 with the cache give the same logits as 4 tokens without."""
    module = model.module
    training, device = module.training, next(module.parameters()).device
    module.eval()
    tokens = torch.arange(1, 5, device=device)[None] % max(model.vocabulary_size or 1, 1)
    columns, lengths = Columns(8), torch.tensor([3])
    try:
        _, layers = reader.prefill(tokens[:, :3], lengths.to(device))
        columns.add(layers, lengths, torch.tensor([0]))
        stepped = reader.step(tokens[:, 3], lengths.to(device), columns)
    except (IndexError, KeyError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        logger.info("%s does not run with a cache: %s", type(module).__name__, error)
        return False
    finally:
        module.train(training)
    expected = model.project(model.hidden(tokens, None, None)[:, -1])
    tolerance = TOLERANCE if expected.dtype in (torch.float32, torch.float64) else TOLERANCE_HALF
    return bool((stepped - expected).abs().max() <= tolerance * expected.abs().max())


@torch.no_grad()
def decodes_statically(reader: StaticReader, model: LanguageModel, *, use_kernels: bool) -> bool:
    """Return True if decoding with static shapes gives the same logits as with `Columns`.

    Args:
        reader: reader of the model.
        model: model that supports a KV cache.
        use_kernels: use `ms_kernels.decode_attention`.
    """
    module: Any = model.module
    device, expected_reader = next(module.parameters()).device, ModelReader(model)
    # Rotary frequencies that depend on the length are selected on the host.
    if isinstance(reader, ModelReader) and (
        not isinstance(model, StagedLanguageModel) or getattr(module, "grows", False)
    ):
        return False
    # Two prompts of different lengths.
    tokens = (torch.arange(10, device=device).view(2, 5) * 7 + 1) % (model.vocabulary_size or 2)
    lengths, rows = torch.tensor([5, 3], device=device), torch.arange(2, device=device)
    newest, columns = tokens[:, 1], Columns(8)
    cache = DecodeCache(2, 8, device, use_kernels=use_kernels)
    try:
        _, layers = reader.prefill(tokens, lengths)
        cache.add(rows, layers, rows)
        cache.set_positions(lengths)
        actual = reader.decode(newest, cache).float()
    except Exception as error:  # of any library, such as Triton's compiler
        logger.warning("%s, which is slower: %s", _fallback(module, use_kernels), error)
        return False
    _, layers = expected_reader.prefill(tokens, lengths)
    columns.add(layers, lengths.cpu(), rows.cpu())
    expected = expected_reader.step(newest, lengths, columns)
    tolerance = TOLERANCE if expected.dtype in (torch.float32, torch.float64) else TOLERANCE_HALF
    difference = (actual - expected.float()).abs().max()
    matches = bool(difference <= tolerance * expected.float().abs().max())
    if not matches:
        logger.warning(
            "%s, which is slower: its logits differ by %.1e",
            _fallback(module, use_kernels),
            float(difference),
        )
    return matches


def _fallback(module: nn.Module, use_kernels: bool) -> str:
    without = "ms-kernels" if use_kernels else "static shapes"
    return f"{type(module).__name__} decodes without {without}"


class ModelReader:
    """Runs a model of ms-parallel or transformers with a KV cache."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._call = _call_huggingface if isinstance(model, HuggingFaceModel) else _call_staged

    def prefill(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Compute logits (B, V) after each prompt, and each layer's keys and values."""
        # Padding on the right needs no mask, as a causal model never attends to it.
        cache = _PromptCache()
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        hidden = self._call(self._model, tokens, positions, cache)  # (B, S, H)
        last = hidden[torch.arange(len(tokens), device=tokens.device), lengths - 1]
        return self._model.project(last), cache.layers

    def step(self, tokens: Tensor, positions: Tensor, columns: Columns) -> Tensor:
        """Compute logits (B, V) after one more token per row."""
        columns.ensure(1)
        cache = _StepCache(columns)
        hidden = self._call(self._model, tokens[:, None], positions[:, None], cache)
        columns.advance()
        return self._model.project(hidden[:, -1])

    def decode(self, tokens: Tensor, cache: DecodeCache) -> Tensor:
        """Compute logits (R, V) after one more token per row."""
        positions = cache.positions[:, None]
        hidden = self._call(self._model, tokens[:, None], positions, _DecodeStep(cache))
        return self._model.project(hidden[:, -1])


class RerunReader:
    """Runs a model with other state than keys and values: each step runs the full rows.

    The columns cache tokens instead of keys and values, (B, S, 2, 1, 1) int64.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._model = model

    def prefill(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Compute logits (B, V) after each prompt, and return the tokens to cache."""
        cache = torch.stack((tokens, tokens), 2)[..., None, None]  # (B, S, 2, 1, 1)
        return self._logits(tokens, lengths), [cache]

    def step(self, tokens: Tensor, positions: Tensor, columns: Columns) -> Tensor:
        """Compute logits (B, V) after one more token per row."""
        columns.ensure(1)
        cache = columns.view(0, 1)
        cache[..., -1, :] = tokens[:, None, None]
        rows = cache[0, :, 0, :, 0]  # (B, W + 1), right-aligned
        starts = columns.offsets()
        # Left-align the rows: a causal model never attends to padding on the right.
        index = starts[:, None] + torch.arange(rows.shape[1], device=rows.device)
        aligned = rows.gather(1, index.clamp(max=rows.shape[1] - 1))
        columns.advance()
        return self._logits(aligned, rows.shape[1] - starts)

    def _logits(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        hidden = self._model.hidden(tokens, None, None)
        return self._model.project(
            hidden[torch.arange(len(tokens), device=tokens.device), lengths - 1]
        )


class _Cache(ABC):
    """Cache in the interface of ms-parallel's models; subclasses store keys and values."""

    attend: Callable[..., Tensor] | None = None
    """Computes attention over the cache. None: the model attends to the result of `append`."""
    documents: Tensor | None = None
    past_length = 0
    """Cached columns before a forward pass."""

    def __init__(self) -> None:
        self._order: dict[int, int] = {}

    @abstractmethod
    def put(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values (B, S, Hk, D) each; return all, (B, W + S, Hk, D) each."""

    @property
    def length(self) -> int:
        """Number of cached positions."""
        return self.past_length

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append a layer's new keys and values; return all."""
        return self.put(self._order.setdefault(layer, len(self._order)), k, v)

    def all_documents(self, new: Tensor | None, rows: int, count: int) -> Tensor | None:
        """Return the documents of cached and new positions."""
        return self.documents

    def advance(self, count: int, documents: Tensor | None) -> None:  # noqa: B027 - optional hook
        """Do nothing, as the reader advances the columns."""


class _PromptCache(_Cache):
    """Collects the keys and values of prompts in a prefill."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[Tensor] = []

    def put(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        assert layer == len(self.layers), "layers must run in order"
        self.layers.append(torch.stack(_same_width(k, v), 2))
        return k, v


class _StepCache(_Cache):
    """Writes the keys and values of one token per row into the columns."""

    def __init__(self, columns: Columns) -> None:
        super().__init__()
        self._columns = columns
        self.past_length = columns.end - columns.first
        mask = columns.mask()
        # Documents express the mask: visible columns are in document 1, like the newest token.
        self.documents = None if mask is None else mask.to(torch.int32)

    def put(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self._columns.view(layer, 1)
        keys, values = keys[..., : k.shape[3]], values[..., : v.shape[3]]
        keys[:, :, -1], values[:, :, -1] = k[:, 0], v[:, 0]
        return keys.transpose(1, 2), values.transpose(1, 2)


class _DecodeStep(_Cache):
    """Writes one token per row into a `DecodeCache` and attends to it."""

    def __init__(self, cache: DecodeCache) -> None:
        super().__init__()
        self._cache = cache
        self._layer = 0
        self._value_width = 0
        self.attend = self._attend

    def put(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self._layer, self._value_width = layer, v.shape[3]
        k, v = _same_width(k, v)
        self._cache.write(layer, k[:, 0], v[:, 0])
        return k, v

    def _attend(self, q: Tensor, **settings: Any) -> Tensor:
        """Attend with queries (R, 1, Hq, D) to the most recently written layer."""
        width = self._cache.layers[self._layer].shape[-1]
        settings["scale"] = settings.get("scale") or q.shape[3] ** -0.5
        padded = F.pad(q[:, 0], (0, width - q.shape[3]))
        attended = self._cache.attend(self._layer, padded, **settings)
        return attended[:, None, :, : self._value_width]


def _same_width(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Pad keys or values (..., D) to the same D; it differs in multi-head latent attention."""
    width = max(k.shape[-1], v.shape[-1])
    padded = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (k, v))
    k, v = padded
    return k, v


def _call_staged(model: LanguageModel, tokens: Tensor, positions: Tensor, cache: Any) -> Tensor:
    hidden: Tensor = model.module(tokens, positions=positions, cache=cache, logits=False)
    return hidden


def _call_huggingface(
    model: LanguageModel, tokens: Tensor, positions: Tensor, cache: Any
) -> Tensor:
    from ms_align.generation.huggingface_cache import CacheAdapter

    mask = None
    if cache.past_length:
        mask = torch.ones(
            tokens.shape[0], 1, cache.past_length + 1, dtype=torch.bool, device=tokens.device
        )
        if cache.documents is not None:
            mask = (cache.documents != 0)[:, None]
    return cast(HuggingFaceModel, model).cached(tokens, positions, mask, CacheAdapter(cache))
