"""Pruning: masks on a model's layers that last through training, quantization and export.

A mask is part of its layer's forward, so no optimizer can revive a pruned weight: its gradient is
zero, and changes by momentum or decay are masked again. `keep_zeros` also sets stored weights to
zero.
"""

from collections.abc import Mapping, Sequence

import torch
from attrs import field, frozen
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ms_compress.arguments import check_number, check_type
from ms_compress.errors import ConfigError, LayerError, OrderError
from ms_compress.methods.pattern import Pattern, parse_pattern
from ms_compress.models.selection import select
from ms_compress.quantization.layers import (
    Prepared,
    check_layer,
    drop_gathered,
    local_part,
    prepare_layer,
    prepared_layers,
)
from ms_compress.settings import integer


def prune(
    model: nn.Module,
    pattern: str | float | Pattern,
    *,
    scores: Mapping[str, Tensor] | None = None,
    ignore: Sequence[str] = (),
    share: float | None = None,
) -> None:
    """Mask every linear layer except the head, in place.

    Args:
        model: plain or prepared for quantization, not split or sharded.
        pattern: `"2:4"`, a sparsity such as 0.5, or a pattern object.
        scores: importance of each weight, (N, K) by layer. None: magnitudes, with weights that are
            already masked scoring lowest.
        ignore: name patterns of modules to leave dense.
        share: a smaller sparsity than the pattern's, for gradual pruning.

    Raises:
        ConfigError: the pattern is invalid, or an exception matches nothing.
        LayerError: the pattern does not divide a layer's rows, or scores lack a layer; nothing is
            masked then.
        OrderError: the model is already split or sharded.
    """
    parsed = parse_pattern(pattern)
    check_number("share", share, minimum=0, error=ConfigError, optional=True)
    selected = select(model, ignore)
    check_pattern(model, parsed, selected)
    if scores is not None:
        _check_scores(scores, selected)
    for name, layer in selected:
        score = _magnitudes(layer) if scores is None else scores[name]
        _set_mask(layer, name, parsed.keep(score, share))
    keep_zeros(model)


def check_pattern(
    model: nn.Module, pattern: Pattern, selected: Sequence[tuple[str, nn.Module]]
) -> None:
    """Check that the model is not split, and that the pattern divides its rows."""
    _check_whole(model, selected)
    for name, layer in selected:
        weight: Tensor = layer.weight  # type: ignore[assignment]
        pattern.check(name, weight.shape[1])


def _check_whole(model: nn.Module, selected: Sequence[tuple[str, nn.Module]]) -> None:
    _check_unsharded(model)
    for name, layer in selected:
        check_layer(layer, name, None)
        if isinstance(layer.weight, DTensor):
            raise OrderError(f"{name} is split over processes; prune the model before splitting it")


def _check_unsharded(model: nn.Module) -> None:
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise OrderError("the model is sharded by fully_shard; prune it before sharding it")


def _check_scores(scores: Mapping[str, Tensor], selected: Sequence[tuple[str, nn.Module]]) -> None:
    check_type("scores", scores, Mapping, "a dict of scores by layer name", error=LayerError)
    for name, layer in selected:
        weight: Tensor = layer.weight  # type: ignore[assignment]
        if name not in scores or scores[name].shape != weight.shape:
            raise LayerError(
                f"{name}: scores must have the shape {tuple(weight.shape)} of the weight"
            )


def _magnitudes(layer: nn.Module) -> Tensor:
    """Return magnitudes, with masked weights below all others even if an optimizer moved them."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    magnitudes = weight.detach().abs()
    mask = layer.mask if isinstance(layer, Prepared) else None
    # Below any magnitude, so that a pruned weight never comes back.
    return magnitudes if mask is None else magnitudes.masked_fill(~mask, -1.0)


def _set_mask(layer: nn.Module, name: str, mask: Tensor) -> None:
    prepare_layer(layer, name, None).set_mask(mask)


def masks(model: nn.Module) -> dict[str, Tensor]:
    """Return the mask (N, K) bool of each pruned layer, by name."""
    check_type("model", model, nn.Module, "a torch.nn.Module", error=LayerError)
    return {
        name: layer.local_mask
        for name, layer in prepared_layers(model)
        if layer.local_mask is not None
    }


def set_masks(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Set masks by layer name, such as masks saved before the model was split.

    Each rank of a pipeline or tensor-parallel model takes its part; call it before fully_shard.

    Args:
        model: model to mask.
        masks: (N, K) bool for the whole weight of each layer.

    Raises:
        LayerError: a name or shape does not belong to this model.
        OrderError: the model is sharded.
    """
    check_type("model", model, nn.Module, "a torch.nn.Module", error=LayerError)
    check_type("masks", masks, Mapping, "a dict of masks by layer name", error=LayerError)
    for name, mask in masks.items():
        check_type(f"masks[{name!r}]", mask, Tensor, "a tensor", error=LayerError)
    if masks:
        _check_unsharded(model)
    layers = dict(model.named_modules())
    for name, mask in masks.items():
        layer = layers.get(name)
        if layer is None and not (getattr(model, "first", True) and getattr(model, "last", True)):
            continue  # the layer is on another pipeline stage
        weight = getattr(layer, "weight", None)
        if layer is None or weight is None or weight.shape != mask.shape:
            raise LayerError(f"{name}: this model has no layer of shape {tuple(mask.shape)} there")
        _set_mask(layer, name, mask.clone())


@torch.no_grad()
def keep_zeros(model: nn.Module) -> None:
    """Set masked weights to zero in storage; call it after optimizer steps.

    Each rank of a split or sharded model processes its own part.
    """
    check_type("model", model, nn.Module, "a torch.nn.Module", error=LayerError)
    drop_gathered(model)  # gathered copies are not the stored weights
    for _, layer in prepared_layers(model):
        weight, mask = layer.weight, layer.stored_mask
        if mask is not None:
            local_part(weight).mul_(mask)


def mask_zeros(model: nn.Module, ignore: Sequence[str] = ()) -> None:
    """Mask weights that are exactly zero: those pruned in a model that was saved and loaded.

    Raises:
        ConfigError: an exception matches nothing.
        OrderError: the model is split or sharded.
    """
    selected = select(model, ignore)
    _check_whole(model, selected)
    for name, layer in selected:
        weight: Tensor = layer.weight  # type: ignore[assignment]
        if bool((weight == 0).any()):  # unpruned layers stay unmasked
            _set_mask(layer, name, weight.detach() != 0)


def sparsity(model: nn.Module) -> float:
    """Return the fraction of pruned weights in masked layers; 0 without masks."""
    layer_masks = masks(model).values()
    total = sum(mask.numel() for mask in layer_masks)
    return 1 - sum(int(mask.sum()) for mask in layer_masks) / total if total else 0.0


@frozen(kw_only=True)
class GradualPruning:
    """Magnitude pruning that rises along a cubic curve from 0 to the pattern's sparsity.

    Zhu and Gupta 2017, arXiv:1710.01878: s(t) = s · (1 - (1 - t)³), with t the fraction of the
    steps from `begin` to `end` that have passed.
    """

    pattern: Pattern = field(converter=parse_pattern)
    """Final pattern, such as `"2:4"` or a sparsity of 0.5."""
    begin: int = field(default=0, validator=integer(minimum=0))
    """Step at which pruning starts."""
    end: int = field(validator=integer())
    """Step from which the masks are final."""
    every: int = field(default=10, validator=integer())
    """Steps between mask updates."""
    ignore: tuple[str, ...] = ()

    def __attrs_post_init__(self) -> None:
        if self.end <= self.begin:
            raise ConfigError(
                f"end must be after begin={self.begin}, got {self.end}; prune for at least one step"
            )

    def share(self, step: int) -> float:
        """Return the sparsity at a step."""
        progress = min(max((step - self.begin) / (self.end - self.begin), 0.0), 1.0)
        # fast at first, while weights are redundant
        return self.pattern.sparsity * (1 - (1 - progress) ** 3)

    def apply(self, model: nn.Module, step: int) -> bool:
        """Update the masks for step `step`, from 0; return whether they changed.

        Pruned weights score lowest even if an optimizer moved them, so they stay pruned.
        """
        # the last update is always at `end`
        due = self.begin <= step <= self.end and (step - self.begin) % self.every == 0
        if not due and step != self.end:
            return False
        prune(model, self.pattern, ignore=self.ignore, share=self.share(step))
        return True
