"""Pruning: masks on a model's layers that hold through training, quantisation and export.

A mask is part of its layer's forward, so no optimizer can bring a pruned weight back: its gradient
is zero, and whatever moves it (momentum from before, decay) is masked again. `keep_zeros` makes
the stored weights zero too.
"""

from collections.abc import Mapping, Sequence

import torch
from attrs import field, frozen
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ms_compress.errors import ConfigError, LayerError, OrderError
from ms_compress.methods.pattern import Pattern, pattern
from ms_compress.models.selection import select
from ms_compress.quantisation.layers import (
    Prepared,
    check_layer,
    drop_gathered,
    local_part,
    prepare_layer,
    prepared_layers,
)
from ms_compress.settings import whole


def prune(
    model: nn.Module,
    how: str | float | Pattern,
    *,
    scores: Mapping[str, Tensor] | None = None,
    exceptions: Sequence[str] = (),
    share: float | None = None,
) -> None:
    """Mask every linear layer but the head, in place.

    Args:
        model: plain or prepared for quantisation, not split or sharded.
        how: `"2:4"`, a share such as 0.5, or a pattern.
        scores: what is lost by pruning each weight, (N, K) by layer; by default magnitudes, where
            weights that are masked already score lowest.
        exceptions: patterns of module names that are left dense.
        share: of weights to prune on the way to the pattern's own.

    Raises:
        ConfigError: no such pattern, or an exception that matches nothing.
        LayerError: the pattern does not divide a layer's rows, or scores lack a layer; nothing is
            masked then.
        OrderError: the model is split or sharded; prune it before.
    """
    wanted = pattern(how)
    chosen = select(model, exceptions)
    check_pattern(model, wanted, chosen)
    if scores is not None:
        _check_scores(scores, chosen)
    for name, layer in chosen:
        score = _magnitudes(layer) if scores is None else scores[name]
        _set_mask(layer, name, wanted.keep(score, share))
    keep_zeros(model)


def check_pattern(
    model: nn.Module, wanted: Pattern, chosen: Sequence[tuple[str, nn.Module]]
) -> None:
    """Refuse a model that was split, or rows that the pattern does not divide."""
    _check_whole(model, chosen)
    for name, layer in chosen:
        weight: Tensor = layer.weight  # type: ignore[assignment]
        wanted.check(name, weight.shape[1])


def _check_whole(model: nn.Module, chosen: Sequence[tuple[str, nn.Module]]) -> None:
    _check_unsharded(model)
    for name, layer in chosen:
        check_layer(layer, name, None)
        if isinstance(layer.weight, DTensor):
            raise OrderError(f"{name} is split over processes; prune the model before it is split")


def _check_unsharded(model: nn.Module) -> None:
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise OrderError("the model is sharded by fully_shard; prune it before it is sharded")


def _check_scores(scores: Mapping[str, Tensor], chosen: Sequence[tuple[str, nn.Module]]) -> None:
    for name, layer in chosen:
        weight: Tensor = layer.weight  # type: ignore[assignment]
        if name not in scores or scores[name].shape != weight.shape:
            raise LayerError(f"{name}: there are no scores of shape {tuple(weight.shape)} for it")


def _magnitudes(layer: nn.Module) -> Tensor:
    """Return magnitudes; a masked weight may have been moved, and scores below all others."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    magnitudes = weight.detach().abs()
    mask = layer.mask if isinstance(layer, Prepared) else None
    return magnitudes if mask is None else magnitudes.masked_fill(~mask, -1.0)


def _set_mask(layer: nn.Module, name: str, kept: Tensor) -> None:
    prepare_layer(layer, name, None).set_mask(kept)


def masks(model: nn.Module) -> dict[str, Tensor]:
    """Return the mask (N, K) bool of each pruned layer, by name."""
    return {
        name: each.local_mask
        for name, each in prepared_layers(model)
        if each.local_mask is not None
    }


def set_masks(model: nn.Module, kept: Mapping[str, Tensor]) -> None:
    """Give layers whole masks by name, such as those of the model before it was split.

    Each process of a pipeline or of a split model takes its part; call it before fully_shard.

    Raises:
        LayerError: a name or shape is not this model's.
        OrderError: the model is sharded.
    """
    if kept:
        _check_unsharded(model)
    layers = dict(model.named_modules())
    for name, mask in kept.items():
        layer = layers.get(name)
        if layer is None and not (getattr(model, "first", True) and getattr(model, "last", True)):
            continue  # of another stage
        weight = getattr(layer, "weight", None)
        if layer is None or weight is None or weight.shape != mask.shape:
            raise LayerError(f"{name}: this model has no layer of shape {tuple(mask.shape)} there")
        _set_mask(layer, name, mask.clone())


@torch.no_grad()
def keep_zeros(model: nn.Module) -> None:
    """Make stored weights zero where they are masked; call it after steps of the optimizer.

    Each process of a split or sharded model does so to its own part.
    """
    drop_gathered(model)  # a copy is not what is stored
    for _, layer in prepared_layers(model):
        weight, mask = layer.weight, layer.stored_mask
        if mask is not None:
            local_part(weight).mul_(mask)


def mask_zeros(model: nn.Module, exceptions: Sequence[str] = ()) -> None:
    """Mask weights that are exactly zero: what was pruned in a model that was saved and read.

    Raises:
        ConfigError: an exception matches nothing.
        OrderError: the model is split or sharded.
    """
    chosen = select(model, exceptions)
    _check_whole(model, chosen)
    for name, layer in chosen:
        weight: Tensor = layer.weight  # type: ignore[assignment]
        if bool((weight == 0).any()):
            _set_mask(layer, name, weight.detach() != 0)


def sparsity(model: nn.Module) -> float:
    """Return the share of masked layers' weights that are pruned; 0 without any."""
    kept = masks(model).values()
    total = sum(mask.numel() for mask in kept)
    return 1 - sum(int(mask.sum()) for mask in kept) / total if total else 0.0


@frozen(kw_only=True)
class GradualPruning:
    """Magnitude pruning that rises along a cubic from none to all of a pattern's share.

    Zhu and Gupta 2017, arXiv:1710.01878: s(t) = s · (1 - (1 - t)³), t the share of the steps from
    `begin` to `end` that have passed.
    """

    how: Pattern = field(converter=pattern)
    begin: int = field(default=0, validator=whole(least=0))
    """Step at which the first weights go."""
    end: int = field(validator=whole())
    """Step from which on the masks stay."""
    every: int = field(default=10, validator=whole())
    """Steps between new masks."""
    exceptions: tuple[str, ...] = ()

    def __attrs_post_init__(self) -> None:
        if self.end <= self.begin:
            raise ConfigError(f"pruning ends at step {self.end}, which is not after {self.begin}")

    def share(self, step: int) -> float:
        """Return the share of weights that are pruned at a step."""
        passed = min(max((step - self.begin) / (self.end - self.begin), 0.0), 1.0)
        return self.how.sparsity * (1 - (1 - passed) ** 3)

    def apply(self, model: nn.Module, step: int) -> bool:
        """Mask the model for step number `step`, from 0; return whether masks changed.

        A weight that was pruned scores lowest, wherever an optimizer has moved it, and stays so.
        """
        due = self.begin <= step <= self.end and (step - self.begin) % self.every == 0
        if not due and step != self.end:
            return False
        prune(model, self.how, exceptions=self.exceptions, share=self.share(step))
        return True
