"""A transformers model or pipeline stage with the interface of `StagedModel`.

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
from ms_parallel.models.huggingface.cache import BlockCache
from ms_parallel.models.huggingface.config import TransformersModel
from ms_parallel.models.huggingface.initialization import HFInit
from ms_parallel.models.huggingface.module_wrapper import ModuleWrapper
from ms_parallel.models.huggingface.packing import ForwardState, isolate_documents
from ms_parallel.models.huggingface.plans import shapes_of
from ms_parallel.models.huggingface.stage_extraction import block_names, extract_stage
from ms_parallel.models.plan import ModelPlan
from ms_parallel.operators.protocol import Ops


class TransformersStage(ModuleWrapper):
    """One pipeline stage, whose parameters have transformers' names.

    Args:
        model: full model on the meta device; modules of other stages are replaced.
        config: model configuration.
        plan: parallel plan of the model.
        layers: block indices of this stage.
        ops: operators for recurrent layers; attention was chosen when the model was built.
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
        # Set through __dict__: nn.Module would register `base` and `tail` as submodules.
        attributes = self.__dict__
        attributes["base"], attributes["plan"] = model.base_model, plan
        # Renamed in transformers 5.24, which warns about the old name.
        forward_params = inspect.signature(model.base_model.forward).parameters
        attributes["cache_name"] = "cache" if "cache" in forward_params else "past_key_values"
        attributes["initializer"] = HFInit(model, config, plan)
        attributes["boundary"] = extract_stage(model, plan, layers)
        attributes["state"] = ForwardState()
        keep_tables_float32(model)
        if self.last:
            head = attributes["head_name"] = _head_name(model)
            attributes["tail"], attributes["plain_head"] = _tail(model), _is_plain(model, head)
            if config.tie_word_embeddings and self.first:
                if type(model._modules[head]) is not nn.Linear:
                    raise ModelError(
                        f"the tied head of {type(model).__name__} must be a plain linear layer;"
                        " train this model with transformers"
                    )
                tied = _Tied(model.get_input_embeddings(), model._modules[head].bias)
                attributes["tail"]._modules[head] = model._modules[head] = tied
        blocks = [model.get_submodule(name) for name in block_names(model, plan)]
        local_blocks = [block for block in blocks if any(True for _ in block.parameters())]
        stateful = [isolate_documents(block, attributes["state"], ops) for block in local_blocks]
        attributes["replays"] = any(stateful)

    def to_empty(self, *, device: Any, recurse: bool = True) -> "TransformersStage":
        """Allocate, and initialize buffers missing from checkpoints, such as rotary frequencies."""
        super().to_empty(device=device, recurse=recurse)
        self.initializer.buffers(self)
        return self

    def draw(self, name: str, seed: int) -> Tensor:
        """Return the unsharded initial value of a parameter or persistent buffer; see `HFInit`."""
        shapes = shapes_of(self.config)
        if name not in shapes and name not in self.initializer.owners:
            buffer: Tensor = self.initializer.persistent_buffer(name, self.get_buffer(name))
            return buffer
        value: Tensor = self.initializer.parameter(name, seed)
        return value.view(shapes.get(name, value.shape))

    @property
    def head_weight(self) -> Tensor:
        """Weight of the output head (V, H); the embedding's if tied and on the same stage.

        Raises:
            ModelError: this stage is not the last.
        """
        if not self.last:
            raise ModelError("only the last pipeline stage has an output head")
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
            cache: keys and values of earlier tokens. If blocks have recurrent state, it stores the
                stage's earlier inputs instead, and these run again.
            logits: whether the last stage applies the head; False returns final hidden states.

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
        if cache is not None and self.replays:  # prepend the earlier inputs: (B, cached + S, ...)
            x, positions = (
                sequence[:, :, 0]
                for sequence in cache.append(0, x[:, :, None], positions[:, :, None])
            )
        hidden = self._run(x, positions, documents, None if self.replays else cache)
        hidden = hidden if hidden.shape[1] == count else hidden[:, -count:]  # new positions only
        # Only now: every block of the stage has appended at the old length.
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
        # Later stages pass dummy tokens for their shape; the boundary feeds in the hidden states.
        tokens = x if self.first else x.new_zeros(x.shape[:2], dtype=torch.int64)
        state: ForwardState = self.state
        state.running, state.documents = True, documents
        try:
            output = self.boundary.run(
                lambda: self.base(
                    input_ids=tokens,
                    position_ids=positions,
                    use_cache=cache is not None,
                    **{self.cache_name: None if cache is None else BlockCache(cache)},
                ),
                None if self.first else x,
            )
        finally:
            state.running, state.documents = False, None
        hidden: Tensor = output if isinstance(output, Tensor) else output.last_hidden_state
        return hidden

    def head(self, hidden: Tensor) -> Tensor:
        """Compute logits (B, S, V) from final hidden states (B, S, H) with the model's forward."""
        logits: Tensor = self.tail(inputs_embeds=hidden, use_cache=False).logits
        return logits


class _Tied(nn.Module):
    """Output head with the embedding's weight.

    Args:
        embedding: owner of the weight (V, H).
        bias: untied bias (V,); None for no bias.
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


class _BaseOutput:
    """Output of a base model with `last_hidden_state` only; other attributes are None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


def _tail(model: Any) -> Any:
    """Copy the model with an identity base, so its forward maps hidden states to logits."""
    tail, base = copy.copy(model), copy.copy(model.base_model)
    base.__dict__["forward"] = lambda *_, inputs_embeds, **__: _BaseOutput(inputs_embeds)
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
    """Whether logits are just head(hidden), without scaling or caps; tested with a tiny head."""
    tail, original_head = _tail(model), model._modules[head_name]
    if type(original_head) is not nn.Linear:  # a subclass may compute something else
        return False
    # Callers build models under an ambient meta device, where values cannot be compared.
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
        head = nn.Linear(original_head.in_features, 5, bias=original_head.bias is not None)
        hidden = torch.randn(1, 2, original_head.in_features)
        tail._modules[head_name] = head
        try:
            logits = tail(inputs_embeds=hidden, use_cache=False).logits
        except Exception as error:  # a forward may use other outputs of its base
            raise ModelError(
                f"the output head of {type(model).__name__} cannot run without the rest of its"
                " forward; train this model with transformers"
            ) from error
        return torch.equal(logits, F.linear(hidden, head.weight))


def keep_tables_float32(model: nn.Module) -> None:
    """Make rotary embeddings return float32 tables for bfloat16 or float16 inputs, in place.

    transformers computes cosines and sines in float32, then rounds them to the dtype of the hidden
    states, the only thing it reads of them. A hook passes zero-stride float32 tensors of the same
    shape instead.
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
