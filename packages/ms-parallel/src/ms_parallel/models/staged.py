"""Base class of all models: embedding, numbered blocks, head, and pipeline stages.

Shapes: B rows, S positions, H hidden, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ms_parallel.errors import ModelError
from ms_parallel.models.cache import KeyValueCache
from ms_parallel.models.config import ModelConfig
from ms_parallel.operators.losses import capped
from ms_parallel.torch_private import is_persistent


class RowSplit(Protocol):
    """Split of row positions over N processes (context parallelism)."""

    def select_local(self, x: Tensor) -> Tensor:
        """Select this process's positions (B, S/N, ...) from all positions (B or 1, S, ...)."""

    def gather(self, part: Tensor) -> Tensor:
        """Gather all positions (B, S, ...) from the (B, S/N, ...) of each process.

        Every process must compute the same function of the result: the backward pass slices out
        the local gradient and does not reduce.
        """

    def attend(
        self, operator: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, **settings: Any
    ) -> Tensor:
        """Compute attention of this process's queries over the full rows.

        Args:
            operator: `ms_parallel.operators.attention` or one with the same signature.
            q: (B, S/N, Hq, D).
            k: (B, S/N, Hk, D).
            v: (B, S/N, Hk, Dv).
            settings: keyword arguments of the operator, except documents.

        Returns:
            (B, S/N, Hq, Dv).
        """


@dataclass(frozen=True, kw_only=True, eq=False)
class Context:
    """Inputs shared by all blocks of a forward pass.

    A dataclass, because torch.compile traces the constructor of a dataclass but not of an attrs
    class.
    """

    documents: Tensor | None
    """(B, cached and new positions) int32."""
    cache: KeyValueCache | None
    row_split: RowSplit | None = None
    """Split of positions under context parallelism; `documents` covers all positions."""


class StagedModel(nn.Module, ABC):
    """A model or one of its pipeline stages.

    Args:
        config: Model configuration.
        block: Builds a block from its global layer index.
        norm: Builds the final norm.
        layers: Global indices of the blocks to build; all by default.
        first: Build the embedding.
        last: Build the final norm and the head.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        block: Callable[[int], nn.Module],
        norm: Callable[[], nn.Module],
        layers: range | None,
        first: bool,
        last: bool,
    ) -> None:
        super().__init__()
        self.config = config
        self.first, self.last = first, last
        self.compute_dtype: torch.dtype | None = None
        """Dtype to cast weights to at use; None for no cast."""
        layers = range(config.num_hidden_layers) if layers is None else layers
        self.model = nn.Module()
        if first:
            size = config.vocab_size, config.hidden_size
            self.model.embed_tokens = nn.Embedding(*size, _weight=torch.empty(size))
            # On meta this would be useless and import torch's compiler, which takes 0.7 s.
            if not self.model.embed_tokens.weight.is_meta:
                self.model.embed_tokens.reset_parameters()
        mtp = config.mtp_layers if last else 0
        mtp_layers = range(config.num_hidden_layers, config.num_hidden_layers + mtp)
        self.model.layers = nn.ModuleDict({str(i): block(i) for i in (*layers, *mtp_layers)})
        # MTP layers embed tokens too; the plan ties this copy of the embedding.
        if mtp and not first:
            size = config.vocab_size, config.hidden_size
            self.model.next_embed_tokens = nn.Embedding(*size, _weight=torch.empty(size))
        if last:
            self.model.norm = norm()
            # A tied head on the embedding's stage uses the embedding's weight.
            if not (config.tie_word_embeddings and first):
                self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> "StagedModel":
        """Copy the model but share the operators, which may be a Python module."""
        for block in self.modules():
            if (ops := getattr(block, "ops", None)) is not None:
                memo[id(ops)] = ops
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        copied.__dict__.update(deepcopy(self.__dict__, memo))
        return copied

    @property
    def head_weight(self) -> Tensor:
        """Output head weight (V, H); the embedding's if tied and on the same stage.

        Raises:
            ModelError: this stage is not the last.
        """
        if not self.last:
            raise ModelError("only the last pipeline stage has an output head")
        head: Any = self.lm_head if hasattr(self, "lm_head") else self.model.embed_tokens
        # A prepared layer (LoRA, fake quantization) computes with another weight than it stores.
        prepared = hasattr(head, "effective_weight")
        weight: Tensor = head.effective_weight() if prepared else head.weight
        return weight if self.compute_dtype is None else weight.to(self.compute_dtype)

    @abstractmethod
    def context(
        self,
        positions: Tensor,
        documents: Tensor | None,
        cache: KeyValueCache | None,
        row_split: RowSplit | None = None,
    ) -> Context:
        """Compute the shared inputs of the blocks, once per forward pass.

        Args:
            positions: (B or 1, S) int64 of the new tokens.
            documents: (B, cached and new positions) int32.
            cache: Cache of earlier positions.
            row_split: Split of positions under context parallelism.
        """

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens, (B, S) int64 to (B, S, H)."""
        return self.model.embed_tokens(tokens)  # type: ignore[operator,no-any-return]

    def finish(self, hidden: Tensor) -> Tensor:
        """Apply the final norm, (B, S, H) to (B, S, H)."""
        return self.model.norm(hidden)  # type: ignore[operator,no-any-return]

    def mtp_states(
        self,
        hidden: Tensor,
        tokens: Tensor,
        *,
        positions: Tensor,
        documents: Tensor | None = None,
        row_split: RowSplit | None = None,
    ) -> Iterator[Tensor]:
        """Yield the hidden states of each MTP layer, given those of the last decoder layer.

        Args:
            hidden: (B, S, H) after the final norm, or this rank's slice of S.
            tokens: (B, S) int64, all positions.
            positions: (B or 1, S) int64.
            documents: (B, S) int32.
            row_split: Split of positions under context parallelism.

        Yields:
            Normalized hidden states, shaped like `hidden`. Depth k uses token i+k at position i; if
            that token is past the row or in another document, the result has no meaning and the
            loss must skip it.
        """
        context = self.context(positions, documents, None, row_split)
        embed: Any = self.embed if self.first else self.model.next_embed_tokens
        first = self.config.num_hidden_layers
        for number in range(first, first + self.config.mtp_layers):
            tokens = torch.cat((tokens[:, 1:], tokens[:, -1:]), 1)  # shift left by one
            layer: Any = self.model.layers[str(number)]  # type: ignore[index]
            # Shifted over the full row first: the next token may be on another rank.
            local_tokens = tokens if row_split is None else row_split.select_local(tokens)
            hidden = layer(hidden, embed(local_tokens), context=context)
            yield hidden

    def head(self, hidden: Tensor) -> Tensor:
        """Compute logits (B, S, V) from normalized hidden states (B, S, H)."""
        separate = hasattr(self, "lm_head")
        logits = self.lm_head(hidden) if separate else F.linear(hidden, self.head_weight)
        softcap = self.config.final_softcap
        return logits if softcap is None else capped(logits, softcap)

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: KeyValueCache | None = None,
        logits: bool = True,
        row_split: RowSplit | None = None,
    ) -> Tensor:
        """Compute logits from tokens; between pipeline stages, pass hidden states.

        Args:
            x: Tokens (B, S) int64 on the first stage, hidden states (B, S, H) on others. With
                sequence parallelism, this rank's slice of S; `positions` is then required.
            positions: (B or 1, S) int64, all positions; by default they continue the cache.
            documents: (B, S) int32; attention never crosses documents.
            cache: Keys and values of earlier tokens; grows by S.
            logits: On the last stage, apply the head; False returns normalized hidden states.
            row_split: Split of positions under context parallelism. Hidden states and logits then
                cover this process's positions, all other tensors the full rows.

        Returns:
            (B, S, V) on the last stage, (B, S, H) on others.
        """
        if self.first and row_split is not None:
            x = row_split.select_local(x)
        hidden = self.embed(x) if self.first else x  # (B, S, H), or this rank's slice of S
        cached = cache.length if cache is not None else 0
        if positions is None:
            positions = torch.arange(cached, cached + hidden.shape[1], device=hidden.device)[None]
        if cache is not None:
            documents = cache.all_documents(documents, hidden.shape[0], positions.shape[1])
        context = self.context(positions, documents, cache, row_split)
        for number, block in self.model.layers.items():  # type: ignore[operator,union-attr]
            if int(number) < self.config.num_hidden_layers:  # the rest are MTP layers
                hidden = block(hidden, context=context)
        if cache is not None:
            # After all layers, since each appends at the same offset.
            cache.advance(positions.shape[1], documents)
        if not self.last:
            return hidden
        hidden = self.finish(hidden)
        return self.head(hidden) if logits else hidden


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors that a checkpoint stores: parameters and persistent buffers."""
    yield from model.named_parameters()
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(path, recurse=False):
            if is_persistent(module, name.rpartition(".")[2]):
                yield name, buffer
