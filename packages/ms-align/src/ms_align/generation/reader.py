"""Runs any model on prompts and on one more token a row, with the keys and values in `Columns`.

The model is called as it is; only the cache that it is handed is ours. Shapes: B rows, S positions,
H hidden, V vocabulary, Hk heads, D width of a head.
"""

import logging
from abc import ABC, abstractmethod
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ms_align.errors import ModelError
from ms_align.generation.columns import Columns
from ms_align.models.language_model import HuggingFaceModel, LanguageModel, PlainModel

logger = logging.getLogger(__name__)
AGREE, AGREE_HALF = 1e-4, 3e-2
"""How far logits by the cache may lie from the model's own, relative to the largest; the second for
half precision, which rounds to 8 or 11 bits."""


class Reader(Protocol):
    """What the generator asks of a model."""

    def read(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Read prompts.

        Args:
            tokens: (B, S) int64, padded on the right.
            lengths: (B,) int64.

        Returns:
            Logits (B, V) after each prompt's last token; of each layer (B, S, 2, Hk, D).
        """

    def step(self, tokens: Tensor, positions: Tensor, columns: Columns) -> Tensor:
        """Read one more token a row, (B,) at positions (B,); logits (B, V). Columns advance."""


def reader_of(model: LanguageModel) -> "ModelReader | RerunReader":
    """Build the reader for a model: with a cache of keys and values, if that gives what it gives.

    Raises:
        ModelError: it is a plain module, of which nothing is known.
    """
    if isinstance(model, PlainModel):
        raise ModelError(
            f"{type(model.module).__name__} takes no cache, so it cannot be generated from; give "
            "a model of ms_parallel or transformers, or a generator of your own"
        )
    reader = ModelReader(model)
    if _has_other_state(model) or not _agrees(reader, model):
        name = type(model.module).__name__
        logger.warning(
            "%s keeps more than keys and values of earlier tokens; each new token reads its whole "
            "row again, which is slow",
            name,
        )
        return RerunReader(model)
    return reader


def _has_other_state(model: LanguageModel) -> bool:
    """Return whether layers keep a state that is no keys and values, such as Mamba's."""
    module: Any = model.module
    if getattr(module, "replays", False) or getattr(module, "_is_stateful", False):
        return True
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None) if isinstance(model, HuggingFaceModel) else None
    return any("attention" not in kind or "linear" in kind for kind in kinds or ())


@torch.no_grad()
def _agrees(reader: "ModelReader", model: LanguageModel) -> bool:
    """Return whether three tokens and one more, by the cache, give what four give at once."""
    module = model.module
    training, device = module.training, next(module.parameters()).device
    module.eval()
    tokens = torch.arange(1, 5, device=device)[None] % max(model.vocabulary_size or 1, 1)
    columns, lengths = Columns(8), torch.tensor([3])
    try:
        _, layers = reader.read(tokens[:, :3], lengths.to(device))
        columns.add(layers, lengths, torch.tensor([0]))
        stepped = reader.step(tokens[:, 3], lengths.to(device), columns)
    except (IndexError, KeyError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        logger.info("%s does not run with a cache: %s", type(module).__name__, error)
        return False
    finally:
        module.train(training)
    whole = model.project(model.hidden(tokens, None, None)[:, -1])
    close = AGREE if whole.dtype in (torch.float32, torch.float64) else AGREE_HALF
    return bool((stepped - whole).abs().max() <= close * whole.abs().max())


class ModelReader:
    """Runs a model of the seam or of transformers."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._call = _call_huggingface if isinstance(model, HuggingFaceModel) else _call_seam

    def read(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Compute logits (B, V) after each prompt, and return what each layer holds of it."""
        # On the right pads need no mask: what comes later is never seen.
        cache = _PromptCache()
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        hidden = self._call(self._model, tokens, positions, cache)
        last = hidden[torch.arange(len(tokens), device=tokens.device), lengths - 1]
        return self._model.project(last), cache.layers

    def step(self, tokens: Tensor, positions: Tensor, columns: Columns) -> Tensor:
        """Compute logits (B, V) after one more token a row."""
        columns.ensure(1)
        cache = _StepCache(columns)
        hidden = self._call(self._model, tokens[:, None], positions[:, None], cache)
        columns.advance()
        return self._model.project(hidden[:, -1])


class RerunReader:
    """Runs a model that keeps another state than keys and values: each step reads rows whole.

    In place of keys and values the columns hold tokens, (B, S, 2, 1, 1) int64.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._model = model

    def read(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Compute logits (B, V) after each prompt, and return its tokens."""
        held = torch.stack((tokens, tokens), 2)[..., None, None]
        return self._logits(tokens, lengths), [held]

    def step(self, tokens: Tensor, positions: Tensor, columns: Columns) -> Tensor:
        """Compute logits (B, V) after one more token a row."""
        columns.ensure(1)
        held = columns.view(0, 1)
        held[..., -1, :] = tokens[:, None, None]
        rows = held[0, :, 0, :, 0]  # (B, W + 1), each row aligned at its end
        begins = (columns.starts - columns.low).to(rows.device)
        # Pads go to the right, where a causal model never sees them.
        at = begins[:, None] + torch.arange(rows.shape[1], device=rows.device)
        aligned = rows.gather(1, at.clamp(max=rows.shape[1] - 1))
        columns.advance()
        return self._logits(aligned, rows.shape[1] - begins)

    def _logits(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        hidden = self._model.hidden(tokens, None, None)
        return self._model.project(
            hidden[torch.arange(len(tokens), device=tokens.device), lengths - 1]
        )


class _Cache(ABC):
    """A cache as models of the seam know it; what it holds of a layer is a subclass's."""

    documents: Tensor | None = None
    held = 0
    """Columns that are held before a forward."""

    def __init__(self) -> None:
        self._order: dict[int, int] = {}

    @abstractmethod
    def put(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Take (B, S, Hk, D) each; give all, (B, W + S, Hk, D) each."""

    @property
    def length(self) -> int:
        """Positions that are held."""
        return self.held

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values behind the present ones, and give all."""
        return self.put(self._order.setdefault(layer, len(self._order)), k, v)

    def all_documents(self, new: Tensor | None, rows: int, count: int) -> Tensor | None:
        """Give the documents of held and new positions."""
        return self.documents

    def advance(self, count: int, documents: Tensor | None) -> None:  # noqa: B027 - and need not
        """Do nothing: the reader advances the columns."""


class _PromptCache(_Cache):
    """Takes the keys and values of prompts as they are made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[Tensor] = []

    def put(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        assert layer == len(self.layers), "layers come in their order"
        width = max(k.shape[3], v.shape[3])  # multi-head latent attention has narrower values
        self.layers.append(
            torch.stack([F.pad(one, (0, width - one.shape[3])) for one in (k, v)], 2)
        )
        return k, v


class _StepCache(_Cache):
    """Writes one token's keys and values into the columns."""

    def __init__(self, columns: Columns) -> None:
        super().__init__()
        self._columns = columns
        self.held = columns.end - columns.low
        mask = columns.mask()
        # The newest token's document is 1, and so are the columns that it sees.
        self.documents = None if mask is None else mask.to(torch.int32)

    def put(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self._columns.view(layer, 1)
        keys, values = keys[..., : k.shape[3]], values[..., : v.shape[3]]
        keys[:, :, -1], values[:, :, -1] = k[:, 0], v[:, 0]
        return keys.transpose(1, 2), values.transpose(1, 2)


def _call_seam(model: LanguageModel, tokens: Tensor, positions: Tensor, cache: Any) -> Tensor:
    hidden: Tensor = model.module(tokens, positions=positions, cache=cache, logits=False)
    return hidden


def _call_huggingface(
    model: LanguageModel, tokens: Tensor, positions: Tensor, cache: Any
) -> Tensor:
    from ms_align.generation.huggingface_cache import CacheFace

    seen = None
    if cache.held:
        seen = torch.ones(
            tokens.shape[0], 1, cache.held + 1, dtype=torch.bool, device=tokens.device
        )
        if cache.documents is not None:
            seen = (cache.documents != 0)[:, None]
    return cast(HuggingFaceModel, model).cached(tokens, positions, seen, CacheFace(cache))
