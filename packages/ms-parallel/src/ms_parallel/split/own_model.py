"""User-defined modules in an engine, split and cut into stages according to their plan.

A module is called as `module(tokens, positions=..., documents=..., cache=...)`, with the keyword
arguments that its forward accepts, and returns logits. Unlike native models it is built in full
before it is split, so it must fit on one process.
"""

import hashlib
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, Protocol

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn

from ms_parallel.cluster.groups import Groups
from ms_parallel.cluster.layout import Layout
from ms_parallel.errors import ConfigError, LayoutError, ModelError
from ms_parallel.memory.modes import Recompute, Sharding, check_recompute
from ms_parallel.memory.recompute import recompute_blocks
from ms_parallel.models.huggingface.module_wrapper import ModuleWrapper
from ms_parallel.models.huggingface.stage_extraction import (
    block_names,
    check_stage_plan,
    extract_stage,
)
from ms_parallel.models.plan import ModelPlan
from ms_parallel.split.precision_choice import MixedPrecision
from ms_parallel.split.sharding import shard_model
from ms_parallel.split.tensor_parallel import split_model

logger = logging.getLogger(__name__)

TRIAL_TOLERANCE = 1e-5
"""Relative tolerance; the same operations on the same weights differ by rounding only."""

UNSPLIT_PLAN = ModelPlan()
"""Plan of a module without one: a single FSDP unit, no tensor parallelism."""


class LanguageModel(Protocol):
    """Interface of a user-defined module."""

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        """Compute logits (B, S, V) from tokens (B, S) int64.

        A multimodal module also accepts `media`; see `models.batch` for its format.
        """


@frozen(kw_only=True)
class OwnModelConfig:
    """Configuration of a user-defined module, which identifies it in checkpoints."""

    model_type: str
    """Class name."""
    weights: str
    """Digest of parameter names and shapes."""
    num_hidden_layers: int = 1
    """Number of blocks that the plan names; 1 if it names none."""
    vocab_size: int = 0
    """Vocabulary size from the module's `config`; 0 if unknown."""
    bos_token_id: None = None
    eos_token_id: None = None
    pad_token_id: None = None

    @classmethod
    def of(cls, module: nn.Module, plan: ModelPlan) -> "OwnModelConfig":
        """Derive the configuration from a module before it is split."""
        # Names and shapes only, as weights change during training.
        shapes = [(name, tuple(value.shape)) for name, value in module.named_parameters()]
        digest = hashlib.sha256(repr(shapes).encode()).hexdigest()[:32]
        blocks = max(1, len(block_names(module, plan)))
        config = getattr(module, "config", None)
        # transformers' multimodal models have the vocabulary in the settings of their text model.
        text_config = getattr(config, "get_text_config", lambda: config)()
        vocabulary = getattr(text_config, "vocab_size", None)
        return cls(
            model_type=type(module).__name__,
            weights=digest,
            num_hidden_layers=blocks,
            vocab_size=vocabulary if isinstance(vocabulary, int) else 0,
        )


class OwnStage(ModuleWrapper):
    """One pipeline stage of a user-defined module; parameter names are unchanged.

    Args:
        module: full module, modified in place.
        plan: names its blocks and ends.
        layers: numbers of the blocks to keep.
    """

    def __init__(self, module: nn.Module, plan: ModelPlan, layers: range) -> None:
        super().__init__(module)
        self.__dict__["first"] = layers.start == 0
        self.__dict__["gate"] = extract_stage(module, plan, layers)

    def forward(self, x: Tensor, *, positions: Tensor, **context: Any) -> Tensor:
        """Map tokens or hidden states to hidden states, or to logits on the last stage.

        Args:
            x: (B, S) int64 on the first stage, (B, S, H) on others.
            positions: (B, S) int64.
            context: documents, cache and media.
        """
        # Later stages still run the module's forward; the gate replaces its embedding by `x`.
        tokens = x if self.first else positions.new_zeros(positions.shape)
        output: Tensor = self.gate.run(
            lambda: call_own(self.inner, tokens, positions=positions, **context),
            None if self.first else x,
        )
        return output


def accepts(module: nn.Module, name: str) -> bool:
    """Return whether a module's forward accepts a keyword argument."""
    # A stage accepts whatever its wrapped module does.
    inner = module.inner if isinstance(module, OwnStage) else module
    parameters = inspect.signature(inner.forward).parameters
    return name in parameters or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )


def check_accepts_cache(module: nn.Module) -> None:
    """Check that a module accepts a KV cache; call it before a pipeline starts, on all ranks.

    Raises:
        ModelError: it does not.
    """
    if not accepts(module, "cache"):
        raise ModelError(
            f"generation needs a cache argument, which {_name(module)}.forward does not accept;"
            " add cache=None, a KeyValueCache"
        )


def warn_without_documents(module: nn.Module) -> None:
    """Warn if a module accepts no documents, so that packed rows will be rejected."""
    if not accepts(module, "documents"):
        logger.warning(
            "%s.forward accepts no documents: a step fails if a row has more than one, and"
            " TokenStream and `ms-parallel train` always send them; add documents=None and mask"
            " attention with it, or leave 'documents' out of the batch",
            _name(module),
        )


def _name(module: nn.Module) -> str:
    return type(module.inner if isinstance(module, OwnStage) else module).__name__


def call_own(module: nn.Module, tokens: Tensor, **context: Any) -> Tensor:
    """Call a module with the positions, documents, cache and media that it accepts."""
    if isinstance(module, OwnStage):
        stage: Tensor = module(tokens, **context)
        return stage
    passed = {name: value for name, value in context.items() if accepts(module, name)}
    _check_passed(module, context, passed)
    # The length tells whether the module has used its cache.
    cache = passed.get("cache")
    cached = cache.length if cache is not None else 0
    logits: Tensor = module(tokens, **passed)
    if cache is not None and cache.length != cached + tokens.shape[1]:
        raise ModelError(
            f"generation needs a filled cache, and {type(module).__name__} did not append its keys"
            " and values; see ms_parallel.models.KeyValueCache"
        )
    if logits.ndim != 3 or logits.shape[:2] != tokens.shape:
        raise ModelError(
            f"{type(module).__name__} must return logits (rows, positions, vocabulary) for tokens"
            f" {tuple(tokens.shape)}, got {tuple(logits.shape)}"
        )
    return logits


def _check_passed(module: nn.Module, context: Mapping[str, Any], passed: Mapping[str, Any]) -> None:
    """Check that a module accepts every argument on which its result depends."""
    documents, cache = context.get("documents"), context.get("cache")
    if "media" in context and "media" not in passed:
        raise ModelError(
            f"the batch has images or audio, which {type(module).__name__}.forward does not accept;"
            " add media=None, or remove them from the data"
        )
    if cache is not None:
        check_accepts_cache(module)
    # A row of one document needs no mask.
    if (
        "documents" not in passed
        and documents is not None
        and bool((documents != documents[:, :1]).any())
    ):
        raise ModelError(
            f"the batch has packed documents, which {type(module).__name__}.forward does not"
            " accept, so attention would cross them; add documents=None, or leave them out"
        )


def check_stages(module: nn.Module, plan: ModelPlan, layers: Sequence[range]) -> None:
    """Check that running a module's stages in order gives the logits of the full module.

    Each stage runs the module's own forward around its blocks, so an operation between blocks
    (`x = block(x).tanh()`) would run once in each stage. Runs a row of 8 tokens through stages that
    share the module's weights, before they are split.

    Args:
        module: full module.
        plan: names its blocks and ends.
        layers: block numbers of each stage, in order.

    Raises:
        ModelError: the logits differ, or a stage does not run.
    """
    device = next(module.parameters()).device
    # Two token ids that every vocabulary has.
    tokens = torch.tensor([[0, 1] * 4], device=device)
    context = {
        "positions": torch.arange(8, device=device)[None],
        "documents": torch.zeros(1, 8, dtype=torch.int32, device=device),
        "cache": None,
    }
    # deepcopy's memo makes the copies share parameters and buffers.
    shared = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    full = deepcopy(module, dict(shared)).eval()
    try:
        with torch.no_grad():
            expected = call_own(full, tokens, **context)
    except Exception:  # needs other inputs, such as media; real errors appear in the first step
        return
    # Tokens for the first stage, then hidden states.
    hidden = tokens
    for stage_layers in layers:
        stage = OwnStage(deepcopy(module, dict(shared)), plan, stage_layers).eval()
        with torch.enable_grad():  # the gate finds earlier stages' results by their autograd graph
            hidden = call_own(stage, hidden, **context).detach()
    difference = float((hidden - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
    if not difference <= TRIAL_TOLERANCE:  # also rejects NaN
        raise ModelError(
            f"pipeline stages of {type(module).__name__} must give the logits of the full module,"
            f" but differ by {difference:.1e} in a trial run: its forward computes something"
            " between its blocks; move that into the blocks, or set pipeline=1"
        )


def build_own(
    module: nn.Module,
    plan: ModelPlan,
    layers: Mapping[int, range],
    groups: Groups,
    *,
    mixed_precision: MixedPrecision,
    recompute: Recompute,
    sharding: Sharding,
    prepare: Callable[[Any], object] | None = None,
) -> dict[int, nn.Module]:
    """Split a user-defined module in place, starting from the weights of rank 0.

    Args:
        module: full module, on every process.
        plan: supported ways to split it.
        layers: block numbers of each stage of this process.
        groups: process groups of the layout.
        mixed_precision: compute dtype.
        recompute: activation checkpointing.
        sharding: sharding mode.
        prepare: called with each stage before it is sharded.

    Returns:
        This process's stages by number; without a pipeline, the module itself as stage 0.
    """
    module.to(groups.device)
    with torch.no_grad():
        _broadcast_weights(module, groups)
    stages: dict[int, nn.Module] = {0: module}
    if groups.layout.pipeline > 1:
        # Every stage cuts its own copy of the module; the last one cuts the module itself.
        copies = [*(deepcopy(module) for _ in range(len(layers) - 1)), module]
        stages = {
            number: OwnStage(copy, plan, layers[number])
            for number, copy in zip(layers, copies, strict=True)
        }
    for stage in stages.values():
        split_model(stage, plan, groups, gather_logits=True)
        if prepare is not None:
            prepare(stage)
        recompute_blocks(stage, plan, recompute)
        shard_model(stage, plan, groups, mixed_precision=mixed_precision, sharding=sharding)
    return stages


def check_own(module: nn.Module, plan: ModelPlan, layout: Layout, recompute: Recompute) -> None:
    """Check that a module's plan supports the layout.

    Raises:
        LayoutError: the layout splits something that the plan does not.
        ConfigError: the plan names missing modules, no parameter is trainable, or recomputation
            needs blocks and the plan names none.
    """
    name = type(module).__name__
    plan.check_names(module)
    if layout.context > 1:
        raise LayoutError(
            f"context={layout.context} cannot split the rows of {name}, whose own attention would"
            " see only a part of each row; set context=1 and raise data instead"
        )
    if layout.expert > 1:
        raise LayoutError(
            f"expert={layout.expert} cannot split the experts of {name}, a user-defined module; set"
            " expert=1: the data axis shards them too"
        )
    if layout.pipeline > 1:
        check_stage_plan(module, plan, layout.pipeline)
    parameters = dict(module.named_parameters())
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError(f"{name} has no parameter to train; unfreeze at least one")
    check_recompute(recompute)
    if recompute != "none" and not any(plan.is_block(path) for path, _ in module.named_modules()):
        raise ConfigError(
            f"recompute={recompute!r} needs to know the blocks of {name}; name them:"
            " ModelPlan(blocks='layers.*')"
        )
    if layout.tensor == 1:
        return
    if not plan.tensor:
        raise LayoutError(
            f"tensor={layout.tensor} cannot split {name} without a plan; pass"
            " plan=ModelPlan(tensor={...}), or set tensor=1 and raise data instead"
        )
    for param_name, parameter in parameters.items():
        dim = plan.split_dim(param_name)
        if dim is not None and parameter.shape[dim] % layout.tensor:
            raise LayoutError(
                f"tensor={layout.tensor} must divide dim {dim % parameter.ndim} of {param_name!r}"
                f" of {name}, which has size {parameter.shape[dim]}; set tensor to a divisor"
            )


def _broadcast_weights(module: nn.Module, groups: Groups) -> None:
    """Broadcast the weights of rank 0; each process may have initialized its own."""
    if groups.layout.world_size == 1:
        return
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.detach(), src=0)
