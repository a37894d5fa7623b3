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
from ms_parallel.models.huggingface.module_wrapper import ModuleWrapper
from ms_parallel.models.huggingface.stage_extraction import (
    block_names,
    check_stage_plan,
    extract_stage,
)
from ms_parallel.models.plan import ModelPlan
from ms_parallel.split.data_axis import Sharding
from ms_parallel.split.memory.recompute import recompute_blocks
from ms_parallel.split.memory.recompute_choice import Recompute, check_recompute
from ms_parallel.split.precision_choice import MixedPrecision
from ms_parallel.split.sharding import shard_model
from ms_parallel.split.tensor_parallel import split_model

logger = logging.getLogger(__name__)

TRIAL_TOLERANCE = 1e-5
"""Relative tolerance; the same operations on the same weights differ by rounding only."""

WHOLE = ModelPlan()
"""The plan of a module that nothing is known of: one unit of sharding."""


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

        One that sees also takes `pictures`, what a batch holds of them; see `models.batch`.
        """


@frozen(kw_only=True)
class OwnModelConfig:
    """What is known of a module of the user's own: enough to distinguish it from another."""

    model_type: str
    """The name of its class."""
    weights: str
    """Digest of the names and shapes of its parameters."""
    num_hidden_layers: int = 1
    """Blocks that stages are made of; 1 where none are known."""
    vocab_size: int = 0
    """Tokens that it knows; 0 where it has no `config` that says."""
    bos_token_id: None = None
    eos_token_id: None = None
    pad_token_id: None = None

    @classmethod
    def of(cls, module: nn.Module, plan: ModelPlan) -> "OwnModelConfig":
        """Make the configuration of a module that is not split yet."""
        shapes = [(name, tuple(value.shape)) for name, value in module.named_parameters()]
        digest = hashlib.sha256(repr(shapes).encode()).hexdigest()[:32]
        blocks = max(1, len(block_names(module, plan)))
        vocabulary = getattr(getattr(module, "config", None), "vocab_size", None)
        return cls(
            model_type=type(module).__name__,
            weights=digest,
            num_hidden_layers=blocks,
            vocab_size=vocabulary if isinstance(vocabulary, int) else 0,
        )


class OwnStage(ModuleWrapper):
    """One stage of a module of the user's own, whose parameters keep their names.

    Args:
        module: whole; its parts are replaced.
        plan: how it is split.
        layers: numbers of the blocks to keep.
    """

    def __init__(self, module: nn.Module, plan: ModelPlan, layers: range) -> None:
        super().__init__(module)
        self.__dict__["first"] = layers.start == 0
        self.__dict__["gate"] = extract_stage(module, plan, layers)

    def forward(self, x: Tensor, *, positions: Tensor, **context: Any) -> Tensor:
        """Turn tokens (on later stages, hidden states) into logits (on earlier ones, hidden).

        Args:
            x: (B, S) int64 on the first stage, (B, S, H) on others.
            positions: (B, S) int64.
            context: documents and cache.
        """
        tokens = x if self.first else positions.new_zeros(positions.shape)
        made: Tensor = self.gate.run(
            lambda: call_own(self.inner, tokens, positions=positions, **context),
            None if self.first else x,
        )
        return made


def takes(module: nn.Module, name: str) -> bool:
    """Return whether a module's forward takes a keyword argument."""
    inner = module.inner if isinstance(module, OwnStage) else module
    named = inspect.signature(inner.forward).parameters
    return name in named or any(each.kind is each.VAR_KEYWORD for each in named.values())


def check_generates(module: nn.Module) -> None:
    """Check that a module takes a cache: before a pipeline starts, so that all ranks agree.

    Raises:
        ModelError: it does not.
    """
    if not takes(module, "cache"):
        raise ModelError(
            f"{_name(module)}.forward takes no cache, without which it cannot generate;"
            " take cache=None, a KeyValueCache"
        )


def warn_of_no_documents(module: nn.Module) -> None:
    """Warn where a module cannot tell documents in packed rows apart, before any row has two."""
    if not takes(module, "documents"):
        logger.warning(
            "%s.forward takes no documents: an update is refused as soon as a row has more than"
            " one, and TokenStream and `ms-parallel train` always send them; take documents=None"
            " and mask attention by it, or leave 'documents' out of the batch",
            _name(module),
        )


def _name(module: nn.Module) -> str:
    return type(module.inner if isinstance(module, OwnStage) else module).__name__


def call_own(module: nn.Module, tokens: Tensor, **context: Any) -> Tensor:
    """Call a module with as much of positions, documents, cache, pictures as its forward names."""
    if isinstance(module, OwnStage):
        stage: Tensor = module(tokens, **context)
        return stage
    passed = {name: value for name, value in context.items() if takes(module, name)}
    _check_passed(module, context, passed)
    cache = passed.get("cache")
    held = cache.length if cache is not None else 0
    made: Tensor = module(tokens, **passed)
    if cache is not None and cache.length != held + tokens.shape[1]:
        raise ModelError(
            f"{type(module).__name__} did not fill its cache, without which it cannot generate; see"
            " ms_parallel.models.KeyValueCache"
        )
    if made.ndim != 3 or made.shape[:2] != tokens.shape:
        raise ModelError(
            f"{type(module).__name__} returned a tensor {tuple(made.shape)} for tokens"
            f" {tuple(tokens.shape)}; return logits (rows, positions, vocabulary)"
        )
    return made


def _check_passed(module: nn.Module, context: Mapping[str, Any], passed: Mapping[str, Any]) -> None:
    """Check that a module takes all of the context on which its result depends."""
    documents, cache = context.get("documents"), context.get("cache")
    if "pictures" in context and "pictures" not in passed:
        raise ModelError(
            f"{type(module).__name__}.forward takes no pictures, and the batch has some; take"
            " pictures=None, or leave them out of the data"
        )
    if cache is not None:
        check_generates(module)
    if (
        "documents" not in passed
        and documents is not None
        and bool((documents != documents[:, :1]).any())
    ):
        raise ModelError(
            f"{type(module).__name__}.forward takes no documents, so that attention would cross"
            " them in packed rows; take documents=None, or leave them out of the batch"
        )


def check_stages(module: nn.Module, plan: ModelPlan, layers: Sequence[range]) -> None:
    """Check that the stages of a module, one after another, compute what the whole module does.

    Each stage runs the module's own forward around its blocks, so an operation between blocks
    (`x = block(x).tanh()`) would run once in each stage. Tries a row of 8 tokens with the module's
    own weights, which the stages share, before they are split.

    Args:
        module: whole.
        plan: names its blocks and ends.
        layers: block numbers of each stage, in order.

    Raises:
        ModelError: the logits differ, or a stage does not run.
    """
    device = next(module.parameters()).device
    tokens = torch.tensor([[0, 1] * 4], device=device)
    context = {
        "positions": torch.arange(8, device=device)[None],
        "documents": torch.zeros(1, 8, dtype=torch.int32, device=device),
        "cache": None,
    }
    shared = {id(each): each for each in (*module.parameters(), *module.buffers())}
    whole = deepcopy(module, dict(shared)).eval()
    try:
        with torch.no_grad():
            expected = call_own(whole, tokens, **context)
    except Exception:  # it needs other inputs, such as pictures; the first update shows it
        return
    hidden = tokens
    for part in layers:
        stage = OwnStage(deepcopy(module, dict(shared)), plan, part).eval()
        with torch.enable_grad():  # by gradients a stage knows what an earlier one's weights made
            hidden = call_own(stage, hidden, **context).detach()
    apart = float((hidden - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
    if not apart <= TRIAL_TOLERANCE:
        raise ModelError(
            f"pipeline stages of {type(module).__name__} must compute the logits of the whole"
            f" module, and differ by {apart:.1e} in a trial: its forward computes something between"
            " its blocks; move that into the blocks, or set pipeline=1"
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
    """Take a module over, in place: every process the first one's weights, then each its part.

    Args:
        module: whole, on every process.
        plan: how it may be split.
        layers: numbers of the blocks of each stage that this process has.
        groups: the layout's processes.
        mixed_precision: compute in bfloat16 or float16.
        recompute: what each block runs again in the backward.
        sharding: what processes share out.
        prepare: what is done to each stage before it is sharded.

    Returns:
        The stages, by number; where the whole is one stage, the module itself.
    """
    module.to(groups.device)
    with torch.no_grad():
        _share(module, groups)
    stages: dict[int, nn.Module] = {0: module}
    if groups.layout.pipeline > 1:
        copies = [*(deepcopy(module) for _ in range(len(layers) - 1)), module]
        stages = {
            number: OwnStage(whole, plan, layers[number])
            for number, whole in zip(layers, copies, strict=True)
        }
    for stage in stages.values():
        split_model(stage, plan, groups, gather_logits=True)
        if prepare is not None:
            prepare(stage)
        recompute_blocks(stage, plan, recompute)
        shard_model(stage, plan, groups, mixed_precision=mixed_precision, sharding=sharding)
    return stages


def check_own(module: nn.Module, plan: ModelPlan, layout: Layout, recompute: Recompute) -> None:
    """Check that a layout asks nothing of a module that its plan does not say.

    Raises:
        LayoutError: the layout splits what the plan does not.
        ConfigError: the plan names what the module has not, there is nothing to train, or no block
            to recompute.
    """
    name = type(module).__name__
    plan.check_names(module)
    if layout.context > 1:
        raise LayoutError(
            f"context={layout.context} cannot share out rows of {name}: its attention is its own"
            " and would see a part of each; set context=1 and give its processes to data"
        )
    if layout.expert > 1:
        raise LayoutError(
            f"expert={layout.expert} cannot share out experts of {name}, whose modules are its own;"
            " set expert=1: data shards them too"
        )
    if layout.pipeline > 1:
        check_stage_plan(module, plan, layout.pipeline)
    parameters = dict(module.named_parameters())
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError(f"{name} has no parameter that requires a gradient, so none to train")
    check_recompute(recompute)
    if recompute != "none" and not any(plan.is_block(each) for each, _ in module.named_modules()):
        raise ConfigError(
            f"recompute={recompute!r} needs the blocks of {name}; name them:"
            " ModelPlan(blocks='layers.*')"
        )
    if layout.tensor == 1:
        return
    if not plan.tensor:
        raise LayoutError(
            f"tensor={layout.tensor} cannot split {name} without a plan; give"
            " plan=ModelPlan(tensor={...}), or set tensor=1 and give its processes to data"
        )
    for each, parameter in parameters.items():
        dim = plan.split_dim(each)
        if dim is not None and parameter.shape[dim] % layout.tensor:
            raise LayoutError(
                f"tensor={layout.tensor} does not divide dim {dim % parameter.ndim} of {each!r} of"
                f" {name}, which is {parameter.shape[dim]}"
            )


def _share(module: nn.Module, groups: Groups) -> None:
    """Give all processes the weights of the first, whatever each has drawn."""
    if groups.layout.world_size == 1:
        return
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.detach(), src=0)
