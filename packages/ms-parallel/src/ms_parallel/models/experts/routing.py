"""Records the experts that routers select during sampling, and replays them in training.

In reinforcement learning, the sampler and the learner may route a token to different experts,
because of rounding or different weights; the ratio of their probabilities is then far from 1
(Ma et al., 2025, arXiv:2510.11370). A replaying router uses the recorded experts but computes their
weights from its own scores, so it is still trained.

Shapes: B rows, S positions, L layers with experts, k experts per token.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ms_parallel.errors import ConfigError
from ms_parallel.models.experts.router import Replay, Router
from ms_parallel.models.staged import RowSplit, StagedModel

_LAYER = re.compile(r"\blayers\.(\d+)\.")


def routers_of(model: nn.Module) -> dict[int, Router]:
    """Return the routers of a model or stage by layer index, without those of MTP layers."""
    routers = {}
    for name, module in model.named_modules():
        layer = _LAYER.search(name)
        if isinstance(module, Router) and layer is not None:
            routers[int(layer[1])] = module
    layers = _layers(model)
    return {layer: routers[layer] for layer in layers if layer in routers}


def _layers(model: nn.Module) -> tuple[int, ...]:
    """Return the indices of the full model's MoE layers; empty for a dense model."""
    # The model may be wrapped by adapters.
    staged = next((part for part in model.modules() if isinstance(part, StagedModel)), None)
    mixture = None if staged is None else staged.config.mixture
    return () if mixture is None else tuple(sorted(mixture.layers))


@contextmanager
def record_experts(model: nn.Module) -> Iterator[Callable[[], Tensor]]:
    """Record the experts of each forward pass.

    Yields:
        A function that returns the experts of the last forward pass, (B, S, L, k) int64.

    Raises:
        ConfigError: the model has no routers.
    """
    routers = routers_of(model)
    if not routers:
        raise ConfigError(
            "recording experts needs a model with routers of ms-parallel, and this one has none"
        )
    selected: dict[int, Tensor] = {}
    for layer, router in routers.items():
        router.on_selection = lambda experts, layer=layer: selected.update({layer: experts})
    try:
        yield lambda: torch.stack([selected[layer] for layer in routers], 2)
    finally:
        for router in routers.values():
            router.on_selection = None


@contextmanager
def replay_experts(
    model: nn.Module, experts: Tensor, row_split: RowSplit | None = None
) -> Iterator[Callable[[], tuple[int, int]]]:
    """Route the tokens of a forward pass to recorded experts; routers still compute the weights.

    Recomputation under activation checkpointing uses the same experts, also after this block.

    Args:
        model: model or pipeline stage.
        experts: (B, S, L, k) integers, for all layers with experts of the full model; where the
            first of k is negative, the router selects.
        row_split: split of positions under context parallelism.

    Yields:
        A function that returns the number of replayed selections (one per token and layer), and
        the number of them in which the router would have selected other experts.

    Raises:
        ConfigError: the experts do not match the model.
    """
    routers = routers_of(model)
    layers = _layers(model)
    if not layers:
        raise ConfigError(
            "routed_experts need a model with experts, and this one is dense; remove them from the "
            "batch"
        )
    if experts.ndim != 4 or experts.shape[2] != len(layers):
        raise ConfigError(
            f"routed_experts must be (B, S, {len(layers)}, k) for {len(layers)} layers with "
            f"experts, got {tuple(experts.shape)}"
        )
    if row_split is not None:
        experts = row_split.select_local(experts)
    replays = []
    for layer, router in routers.items():
        router.replay = Replay(experts[:, :, layers.index(layer)].long())
        replays.append(router.replay)
    try:
        yield lambda: (
            int(sum(replay.count for replay in replays)),
            int(sum(replay.differing for replay in replays)),
        )
    finally:
        for router in routers.values():
            router.replay = None
