"""A transformers model, or one pipeline stage of it, with the interface of our own models.

Shapes: B rows, S positions, H hidden, V vocabulary.
"""

import copy
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ms_parallel.errors import ModelError
from ms_parallel.models.cache import KeyValueCache
from ms_parallel.models.huggingface.around import Around
from ms_parallel.models.huggingface.cache import BlockCache
from ms_parallel.models.huggingface.config import TransformersModel
from ms_parallel.models.huggingface.cut import block_names, cut
from ms_parallel.models.huggingface.fresh import Fresh
from ms_parallel.models.huggingface.packing import Now, keep_apart
from ms_parallel.models.huggingface.plans import shapes_of
from ms_parallel.models.plan import ModelPlan
from ms_parallel.operators.protocol import Ops


class TransformersStage(Around):
    """One stage, whose parameters have transformers' names.

    Args:
        model: whole model without storage; parts of other stages are replaced.
        config: model configuration.
        plan: how the model is split.
        layers: numbers of the blocks to keep.
        ops: operators of recurrent layers; the model's attention already uses its own.
    """

    config: Any
    first: bool
    last: bool

    def __init__(
        self, model: Any, config: TransformersModel, plan: ModelPlan, layers: range, ops: Ops
    ) -> None:
        super().__init__(model)
        count = len(block_names(model, plan))
        self.first, self.last = layers.start == 0, layers.stop == count
        self.config = config
        attributes = self.__dict__
        attributes["base"], attributes["plan"] = model.base_model, plan
        # Renamed in transformers 5.24, which warns about the old name.
        forward_params = inspect.signature(model.base_model.forward).parameters
        attributes["cache_name"] = "cache" if "cache" in forward_params else "past_key_values"
        attributes["drawn"] = Fresh(model, config, plan)
        attributes["gate"], attributes["now"] = cut(model, plan, layers), Now()
        keep_tables_float32(model)
        if self.last:
            head = attributes["head_name"] = _head_name(model)
            attributes["tail"], attributes["plain_head"] = _tail(model), _is_plain(model, head)
            if config.tie_word_embeddings and self.first:
                if type(model._modules[head]) is not nn.Linear:
                    raise ModelError(
                        f"the tied head of {type(model).__name__} is more than a linear layer;"
                        " train this model with transformers"
                    )
                tied = _Tied(model.get_input_embeddings(), model._modules[head].bias)
                attributes["tail"]._modules[head] = model._modules[head] = tied
        blocks = [model.get_submodule(name) for name in block_names(model, plan)]
        local_blocks = [block for block in blocks if any(True for _ in block.parameters())]
        stateful = [keep_apart(block, attributes["now"], ops) for block in local_blocks]
        attributes["replays"] = any(stateful)

    def to_empty(self, *, device: Any, recurse: bool = True) -> "TransformersStage":
        """Allocate, and compute buffers that no folder has, such as rotary frequencies."""
        super().to_empty(device=device, recurse=recurse)
        self.drawn.buffers(self)
        return self

    def draw(self, name: str, seed: int) -> Tensor:
        """Draw the unsharded initial value of a parameter by the model's own rule; see `Fresh`."""
        shape = shapes_of(self.config)
        if name not in shape and name not in self.drawn.owners:
            buffer: Tensor = self.drawn.persistent_buffer(name, self.get_buffer(name))
            return buffer
        value: Tensor = self.drawn.parameter(name, seed)
        return value.view(shape.get(name, value.shape))

    @property
    def head_weight(self) -> Tensor:
        """Head weight (V, H); the embedding's if tied and on the same stage.

        Raises:
            ModelError: this stage is not the last.
        """
        if not self.last:
            raise ModelError("only the last stage has a head; ask that one")
        head: Any = self._modules[self.head_name]
        weight: Tensor = head.weight
        return weight

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: KeyValueCache | None = None,
        logits: bool = True,
    ) -> Tensor:
        """Map tokens (later stages: hidden states) to logits (earlier stages: hidden states).

        Args:
            x: (B, S) int64 on the first stage, (B, S, H) on others.
            positions: (B or 1, S) int64.
            documents: (B, S) int32.
            cache: keys and values of earlier tokens; if blocks have another state, the stage's
                inputs for earlier tokens, which are run again.
            logits: whether the last stage applies the head or returns final hidden states.

        Returns:
            (B, S, V) on the last stage, (B, S, H) on others.
        """
        rows, count = x.shape[:2]
        cached_length = cache.length if cache is not None else 0
        if positions is None:
            positions = torch.arange(cached_length, cached_length + count, device=x.device)[None]
        if cache is not None:
            documents = cache.all_documents(documents, rows, count)
        positions = positions.expand(rows, count)
        if cache is not None and self.replays:
            x, positions = (
                sequence[:, :, 0]
                for sequence in cache.append(0, x[:, :, None], positions[:, :, None])
            )
        hidden = self._run(x, positions, documents, None if self.replays else cache)
        hidden = hidden if hidden.shape[1] == count else hidden[:, -count:]
        if cache is not None:
            cache.advance(count, documents)
        return self.head(hidden) if self.last and logits else hidden

    def _run(
        self,
        x: Tensor,
        positions: Tensor,
        documents: Tensor | None,
        cache: KeyValueCache | None,
    ) -> Tensor:
        tokens = x if self.first else x.new_zeros(x.shape[:2], dtype=torch.int64)
        now: Now = self.now
        now.running, now.documents = True, documents
        try:
            output = self.gate.run(
                lambda: self.base(
                    input_ids=tokens,
                    position_ids=positions,
                    use_cache=cache is not None,
                    **{self.cache_name: None if cache is None else BlockCache(cache)},
                ),
                None if self.first else x,
            )
        finally:
            now.running, now.documents = False, None
        hidden: Tensor = output if isinstance(output, Tensor) else output.last_hidden_state
        return hidden

    def head(self, hidden: Tensor) -> Tensor:
        """Compute logits (B, S, V) from final hidden states (B, S, H) by the model's forward."""
        logits: Tensor = self.tail(inputs_embeds=hidden, use_cache=False).logits
        return logits


class _Tied(nn.Module):
    """Output head that uses the embedding's weight.

    Args:
        embedding: owner of the weight (V, H).
        bias: the head's bias (V,), which is not tied; None for no bias.
    """

    def __init__(self, embedding: Any, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.__dict__["embedding"] = embedding
        self.bias = bias

    @property
    def weight(self) -> Tensor:
        """(V, H)."""
        weight: Tensor = self.__dict__["embedding"].weight
        return weight

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (B, S, H) to (B, S, V)."""
        return F.linear(hidden, self.weight, self.bias)


class _Outcome:
    """Output of a base model: its last hidden states; every other attribute is None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, place: int) -> Tensor:
        return (self.last_hidden_state,)[place]


def _tail(model: Any) -> Any:
    """Copy the model with a base that returns its input, so that the forward computes logits."""
    tail, base = copy.copy(model), copy.copy(model.base_model)
    base.__dict__["forward"] = lambda *_, inputs_embeds, **__: _Outcome(inputs_embeds)
    tail.__dict__["_modules"] = {**model._modules, model.base_model_prefix: base}
    return tail


def _head_name(model: Any) -> str:
    head = model.get_output_embeddings()
    for name, child in model.named_children():
        if child is head and isinstance(child, nn.Linear):
            return str(name)
    raise ModelError(
        f"the output head of {type(model).__name__} must be a linear layer of the model itself;"
        " train this model with transformers"
    )


def _is_plain(model: Any, head_name: str) -> bool:
    """Return whether logits are only the head's product, tested with a head of a few tokens."""
    tail, original_head = _tail(model), model._modules[head_name]
    if type(original_head) is not nn.Linear:  # a subclass may do more than the product
        return False
    # Callers build models under an ambient meta device, where values cannot be compared.
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
        head = nn.Linear(original_head.in_features, 5, bias=original_head.bias is not None)
        hidden = torch.randn(1, 2, original_head.in_features)
        tail._modules[head_name] = head
        try:
            logits = tail(inputs_embeds=hidden, use_cache=False).logits
        except Exception as error:  # a forward may use other outputs of its base
            kind = type(model).__name__
            raise ModelError(
                f"the output head of {kind} cannot run apart from the rest of its forward; train"
                " this model with transformers"
            ) from error
        return torch.equal(logits, F.linear(hidden, head.weight))


def keep_tables_float32(model: nn.Module) -> None:
    """Make rotary embeddings return float32 for narrower hidden states, in place.

    They compute cosines and sines in float32 and round them to the dtype of the hidden states, of
    which they use nothing else. They therefore receive float32 tensors of the same shape, without
    storage.
    """
    for module in model.modules():
        if any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)):
            module.register_forward_pre_hook(_widen_hidden, with_kwargs=True)


def _widen_hidden(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return tuple(map(_widen, args)), {name: _widen(value) for name, value in kwargs.items()}


def _widen(value: Any) -> Any:
    if not (isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)):
        return value
    return value.new_empty((), dtype=torch.float32).expand(value.shape)
