"""Quantization-aware training: prepare a model's layers in place to compute like the target."""

import logging
from collections.abc import Container, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from attrs import field, frozen
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ms_compress.arguments import check_flags, check_type
from ms_compress.errors import ConfigError, LayerError, OrderError
from ms_compress.models.head import find_head
from ms_compress.models.selection import select
from ms_compress.quantization.fake_quantization import fake_input
from ms_compress.quantization.layers import (
    Prepared,
    check_axes,
    check_layer,
    drop_gathered,
    local_part,
    prepare_layer,
    prepared_layers,
)
from ms_compress.quantization.rounding import best_factor
from ms_compress.quantization.scheme import Scheme
from ms_compress.settings import integer
from ms_compress.targets.rules import NAMES, layer_scheme, scheme

M = TypeVar("M", bound=nn.Module)

logger = logging.getLogger(__name__)


def qat(
    model: M,
    scheme_name: str | Scheme,
    *,
    ignore: Sequence[str] = (),
    embeddings: bool = False,
    head: bool = False,
    activations: bool = True,
    learned_scales: bool = False,
) -> M:
    """Prepare a model to compute like a scheme's target, so that training sees the deployed model.

    Every `nn.Linear` except the head is prepared in place. Parameters keep their names, values and
    gradients, so any training loop and optimizer works. With tensor parallelism, split the model
    before or after this call (before it if scales are learned), then call fully_shard.

    Args:
        model: a complete model, or one pipeline stage.
        scheme_name: scheme or its name, such as `"gguf.q4_0"`.
        ignore: name patterns of modules to leave unchanged, such as `"*.down_proj"`.
        embeddings: also prepare `nn.Embedding`.
        head: also prepare the output head: the module `lm_head`, or the embedding it is tied to.
        activations: also quantize inputs, if the target does.
        learned_scales: learn a factor for each scale (LSQ), rounded to the target's scale dtype;
            a weight shared by embedding and head keeps the scheme's own scales.

    Returns:
        The same model.

    Raises:
        SchemeError: the scheme does not exist.
        LayerError: a layer is not supported; the message names it and what is supported. The model
            is unchanged.
        OrderError: the model was sharded or split in an unsupported order.
    """
    check_flags(
        embeddings=embeddings,
        head=head,
        activations=activations,
        learned_scales=learned_scales,
        error=ConfigError,
    )
    quant_scheme = scheme(scheme_name)
    selected = select(model, ignore, embeddings=embeddings, head=head)
    if not selected:
        raise LayerError(f"nothing in {type(model).__name__} is left to prepare for {quant_scheme}")
    sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    _check_wrappers(model, sharded=sharded, learned_scales=learned_scales)
    _check_embeddings(model, quant_scheme, dict(selected), embeddings=embeddings, head=head)
    # All checks come before the first change, so that an error leaves the model unchanged.
    layer_schemes = _layer_schemes(model, quant_scheme, selected)
    for name, layer in selected:
        check_layer(layer, name, layer_schemes[name])
        if not sharded:
            check_axes(name, layer.weight)  # type: ignore[arg-type]
    output = find_head(model)
    for name, layer in selected:
        # The uses of a tied weight may be on two stages, so it keeps the scheme's own scales.
        shared = output.is_tied and (isinstance(layer, nn.Embedding) or name == output.layer)
        own_scheme = layer_schemes[name]
        prepared = prepare_layer(
            layer,
            name,
            own_scheme,
            activations=own_scheme.activations if activations else None,
            learned_scales=learned_scales and not shared,
        )
        if _runs_as_is_in_transformers(model, name):
            prepared.input_ndim = own_scheme.input_ndim
    # ms-parallel multiplies by the head's weight, so no prepared layer rounds that input.
    if head and _is_staged(model) and getattr(model, "last", True):
        _round_head_input(model, dict(selected))
    return model


@torch.no_grad()
def fit_scales(model: nn.Module, importance: Mapping[str, Tensor] = MappingProxyType({})) -> None:
    """Set learned scales to those with the smallest rounding error for the current weights.

    Used for rounding to nearest without training, or as initial values for learning; masks are
    preserved. Only layers prepared with `qat(..., learned_scales=True)` have scales to set.

    Args:
        model: prepared model.
        importance: weight of the squared error of each input feature, (K,) by layer name, as from
            `input_importance`; layers without an entry weight all features equally.

    Raises:
        LayerError: no layer has learned scales.
    """
    check_type("model", model, nn.Module, "a torch.nn.Module", error=LayerError)
    drop_gathered(model)
    layers = {name: layer for name, layer in prepared_layers(model) if layer.factor is not None}
    if not layers:
        raise LayerError(
            f"no layer of {type(model).__name__} has learned scales; prepare it with"
            " learned_scales=True"
        )
    for name, layer in layers.items():
        assert layer.scheme is not None
        assert layer.factor is not None
        weight, mask = local_part(layer.weight), layer.stored_mask
        # Pruned weights are stored as zeros and must not influence the scales.
        masked = weight if mask is None else weight * mask
        costs = importance.get(name)
        local_part(layer.factor).copy_(best_factor(masked, layer.scheme, costs))


def set_quantizing(model: nn.Module, on: bool) -> None:
    """Switch prepared layers between float and quantized computation."""
    for _, layer in prepared_layers(model):
        layer.quantizing = on


@frozen(kw_only=True)
class FloatThenQuantized:
    """Schedule: some steps in float, then quantized."""

    float_steps: int = field(validator=integer(minimum=0))
    """Number of float steps."""

    def apply(self, model: nn.Module, step: int) -> bool:
        """Set the mode for step `step`, from 0; return whether the model is quantized."""
        on = step >= self.float_steps
        set_quantizing(model, on)
        return on


def _check_wrappers(model: nn.Module, *, sharded: bool, learned_scales: bool) -> None:
    """Check that learned scales are created before the model is wrapped by FSDP or DDP."""
    if learned_scales and sharded:
        raise OrderError(
            "learned scales are parameters, which fully_shard must see; prepare the model first,"
            " then shard it"
        )
    if learned_scales and isinstance(model, DistributedDataParallel):
        raise OrderError(
            "learned scales are parameters, which DistributedDataParallel must see; prepare the"
            " model first, then wrap it"
        )


def _check_embeddings(
    model: nn.Module,
    quant_scheme: Scheme,
    selected: Container[str],
    *,
    embeddings: bool,
    head: bool,
) -> None:
    """Check that both uses of a tied weight are treated equally: the file has one tensor."""
    if embeddings and not quant_scheme.embeddings:
        raise LayerError(
            f"{quant_scheme} cannot store a quantized embedding for its runtime; use"
            f" {', '.join(name for name in NAMES if scheme(name).embeddings)}"
        )
    output = find_head(model)
    if not output.embeddings:
        return
    tied = min(output.embeddings)
    output_layer = output.layer or tied
    if embeddings != head:
        raise LayerError(
            f"{tied} is also the head's weight, which {quant_scheme} stores once; set embeddings"
            " and head to the same value"
        )
    if (tied in selected) != (output_layer in selected):
        raise LayerError(
            f"{tied} and {output_layer} are one weight, which {quant_scheme} stores once; name both"
            " in `ignore`, or neither"
        )


def _round_head_input(model: nn.Module, selected: Mapping[str, nn.Module]) -> None:
    """Round the final norm's output if the head is a matmul with a weight instead of a layer.

    In that case no prepared layer is called that could round its input.
    """
    head = selected.get("lm_head", selected.get("model.embed_tokens"))
    norm: nn.Module = model.model.norm  # type: ignore[assignment]
    # A second call must not round the input twice.
    if head is None or any(isinstance(hook, _HeadInput) for hook in norm._forward_hooks.values()):
        return
    assert isinstance(head, Prepared)
    norm.register_forward_hook(_HeadInput(head))


@frozen(eq=False)
class _HeadInput:
    """Forward hook of the final norm that rounds the head's input."""

    head: Prepared

    def __call__(self, norm: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        activations = self.head.rule.activations
        if activations is None:
            return output
        return fake_input(output, activations, self.head.observe(output))


def _layer_schemes(
    model: nn.Module, quant_scheme: Scheme, selected: Sequence[tuple[str, nn.Module]]
) -> dict[str, Scheme]:
    """Return the scheme of each layer; logs layers that cannot have the model's scheme."""
    config: Any = getattr(model, "config", None)
    layers = getattr(config, "num_hidden_layers", 0)
    output = find_head(model)
    schemes = {}
    for name, layer in selected:
        weight: Tensor | None = layer._parameters.get("weight")
        features = 0 if weight is None else weight.shape[-1]
        # A tied head is named by its embedding.
        is_output = name == output.layer or name in output.embeddings
        schemes[name] = layer_scheme(
            quant_scheme, "lm_head" if is_output else name, features, layers
        )
    for fallback in {quant_scheme.fallback} - {None}:
        names = [name for name, layer in schemes.items() if layer.name == fallback]
        if names:
            logger.warning(
                "%d of %d layers, such as %s, have row lengths that are not multiples of 256;"
                " they use %s",
                len(names),
                len(schemes),
                names[0],
                fallback,
            )
    return schemes


def _runs_as_is_in_transformers(model: nn.Module, name: str) -> bool:
    """Return whether a module of transformers calls the layer, as it does in deployment."""
    classes = type(model.get_submodule(name.rpartition(".")[0])).__mro__
    return any(cls.__module__.startswith("transformers.") for cls in classes)


def _is_staged(model: nn.Module) -> bool:
    """Return whether the model exposes its head as a weight, as ms-parallel's models do."""
    return hasattr(type(model), "head_weight")
