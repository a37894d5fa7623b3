"""Quantisation-aware training: a model's layers, prepared in place, compute as the target will."""

from collections.abc import Container, Mapping, Sequence
from typing import TypeVar

import torch
from attrs import field, frozen
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ms_compress.errors import LayerError, OrderError
from ms_compress.models.head import find_head
from ms_compress.models.selection import select
from ms_compress.quantisation.fake_quantisation import fake_input
from ms_compress.quantisation.layers import (
    Prepared,
    check_axes,
    check_layer,
    drop_gathered,
    local_part,
    prepare_layer,
    prepared_layers,
)
from ms_compress.quantisation.rounding import best_factor
from ms_compress.quantisation.scheme import Scheme
from ms_compress.settings import whole
from ms_compress.targets.rules import NAMES, scheme

M = TypeVar("M", bound=nn.Module)


def qat(
    model: M,
    scheme_name: str | Scheme,
    *,
    exceptions: Sequence[str] = (),
    embeddings: bool = False,
    head: bool = False,
    activations: bool = True,
    learned_scales: bool = False,
) -> M:
    """Make a model compute as a scheme's target will, so that training meets what is deployed.

    Every `nn.Linear` but the head is prepared in place. Parameters keep names, values and
    gradients; any loop and optimizer trains on. Order under parallelism: tensor-parallel split and
    this in either order (this last, if scales are learned), then fully_shard.

    Args:
        model: whole, or one pipeline stage.
        scheme_name: such as `"gguf.q4_0"`, or a Scheme.
        exceptions: patterns of module names that stay as they are, such as `"*.down_proj"`.
        embeddings: prepare `nn.Embedding` too.
        head: prepare the output head, the module called `lm_head`, or the embedding it is tied to.
        activations: also round inputs, where the target does.
        learned_scales: learn a factor for each scale (LSQ), rounded to the target's scale dtype;
            a weight that embedding and head share keeps the scheme's own scales.

    Returns:
        The same model.

    Raises:
        SchemeError: there is no such scheme.
        LayerError: a layer cannot be taken; the message names it and what fits. The model is then
            as it was.
        OrderError: the model was sharded or split in an order that cannot be right.
    """
    how = scheme(scheme_name)
    chosen = select(model, exceptions, embeddings=embeddings, head=head)
    if not chosen:
        raise LayerError(f"nothing in {type(model).__name__} is left to prepare for {how}")
    sharded = any(isinstance(each, FSDPModule) for each in model.modules())
    _check_wrappers(model, sharded=sharded, learned_scales=learned_scales)
    _check_embeddings(model, how, dict(chosen), embeddings=embeddings, head=head)
    for name, layer in chosen:
        check_layer(layer, name, how)
        if not sharded:
            check_axes(name, layer.weight)  # type: ignore[arg-type]
    output = find_head(model)
    for name, layer in chosen:
        # The two uses of a tied weight may lie on two stages: it keeps the scheme's own scales.
        shared = output.is_tied and (isinstance(layer, nn.Embedding) or name == output.layer)
        prepared = prepare_layer(
            layer,
            name,
            how,
            activations=how.activations if activations else None,
            learned_scales=learned_scales and not shared,
        )
        if _runs_as_is_in_transformers(model, name):
            prepared.input_ndim = how.input_ndim
    if head and _is_staged(model) and getattr(model, "last", True):
        _round_head_input(model, dict(chosen))
    return model


@torch.no_grad()
def fit_scales(model: nn.Module) -> None:
    """Set learned scales to those at which rounding the weights as they are errs least.

    It serves rounding to nearest without training, and as the start of learning; masks are kept.
    Only what `qat(..., learned_scales=True)` prepared has scales to set.

    Raises:
        LayerError: no layer has learned scales.
    """
    drop_gathered(model)
    found = [layer for _, layer in prepared_layers(model) if layer.factor is not None]
    if not found:
        raise LayerError(
            f"no layer of {type(model).__name__} has scales to set; prepare it with"
            " learned_scales=True"
        )
    for layer in found:
        assert layer.scheme is not None
        assert layer.factor is not None
        weight, mask = local_part(layer.weight), layer.stored_mask
        kept = weight if mask is None else weight * mask
        local_part(layer.factor).copy_(best_factor(kept, layer.scheme))


def set_quantising(model: nn.Module, on: bool) -> None:
    """Let prepared layers compute in float, or as the target will."""
    for _, layer in prepared_layers(model):
        layer.quantizing = on


@frozen(kw_only=True)
class FloatThenQuantised:
    """A schedule of some steps in float, and then as the target will compute."""

    float_steps: int = field(validator=whole(least=0))
    """Steps in float."""

    def apply(self, model: nn.Module, step: int) -> bool:
        """Set the model for step number `step`, from 0; return whether it quantises."""
        on = step >= self.float_steps
        set_quantising(model, on)
        return on


def _check_wrappers(model: nn.Module, *, sharded: bool, learned_scales: bool) -> None:
    """Refuse learned scales in a model that FSDP or DDP wraps already."""
    if learned_scales and sharded:
        raise OrderError(
            "learned scales are parameters, which fully_shard must see; prepare first, then shard"
        )
    if learned_scales and isinstance(model, DistributedDataParallel):
        raise OrderError(
            "learned scales are parameters, which DistributedDataParallel must see; prepare the"
            " model first, then wrap it"
        )


def _check_embeddings(
    model: nn.Module, how: Scheme, chosen: Container[str], *, embeddings: bool, head: bool
) -> None:
    """Refuse to round one use of a tied weight alone: it is one tensor in the file."""
    if embeddings and not how.embeddings:
        raise LayerError(
            f"{how} cannot store a quantized embedding that its runtime reads; use one of"
            f" {', '.join(name for name in NAMES if scheme(name).embeddings)}"
        )
    output = find_head(model)
    if not output.embeddings:
        return
    tied = min(output.embeddings)
    product = output.layer or tied
    if embeddings != head:
        raise LayerError(
            f"{tied} is also the head's weight, which {how} stores once; set embeddings and head"
            " alike"
        )
    if (tied in chosen) != (product in chosen):
        raise LayerError(
            f"{tied} and {product} are one weight, which {how} stores once; name both as"
            " exceptions, or neither"
        )


def _round_head_input(model: nn.Module, chosen: Mapping[str, nn.Module]) -> None:
    """Round the final norm's output, where the head is a product with a weight and no layer.

    No layer is called there that could round its own input.
    """
    head = chosen.get("lm_head", chosen.get("model.embed_tokens"))
    norm: nn.Module = model.model.norm  # type: ignore[assignment]
    if head is None or any(isinstance(each, _HeadInput) for each in norm._forward_hooks.values()):
        return
    assert isinstance(head, Prepared)
    norm.register_forward_hook(_HeadInput(head))


@frozen(eq=False)
class _HeadInput:
    """A hook of the final norm that rounds the head's input."""

    head: Prepared

    def __call__(self, norm: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        how = self.head.rule.activations
        return output if how is None else fake_input(output, how)


def _runs_as_is_in_transformers(model: nn.Module, name: str) -> bool:
    """Return whether the layer's caller is a module of transformers, which deployment runs too."""
    kinds = type(model.get_submodule(name.rpartition(".")[0])).__mro__
    return any(kind.__module__.startswith("transformers.") for kind in kinds)


def _is_staged(model: nn.Module) -> bool:
    """Return whether the model gives its head as a weight, as ms-parallel's models do."""
    return hasattr(type(model), "head_weight")
