"""Loads adapters from peft's files."""

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from attrs import evolve
from torch import Tensor, nn

from ms_align.arguments import check_type
from ms_align.errors import ModelError
from ms_align.files.untrusted import check_path
from ms_align.lora.adapter_file import (
    AdapterConfig,
    Weights,
    expert_modules,
    expert_tensors,
    read_adapter,
)
from ms_align.lora.adapters import AdaptedModel, adapt, ends_with, expert_weights, linear_layers
from ms_align.lora.expert_files import EXPERT, PER_EXPERT, ExpertNames, stack_experts
from ms_align.lora.initialization import INITIAL_ADAPTERS
from ms_align.lora.layers import AdapterTensors
from ms_align.lora.options import LoraOptions


def load_lora(model: nn.Module, folder: str | Path) -> AdaptedModel:
    """Add the adapters in a folder of peft's format to a model, in place.

    For `pissa` and `olora`, peft subtracts s·B₀·A₀ from the weights. Here the weights stay
    unchanged and the adapter includes -s·B₀·A₀, which doubles its rank. The results are the same,
    and with the adapter disabled the model equals its base.

    Args:
        model: base model that the adapters were trained for.
        folder: folder with `adapter_config.json` and `adapter_model.safetensors`.

    Raises:
        ModelError: the folder has no LoRA adapter, or an unsupported one (trained biases or
            modules), or it does not match the model.
    """
    check_path("an adapter", folder, error=ModelError)
    check_type("model", model, nn.Module, "a torch.nn.Module", error=ModelError)
    config, stored = read_adapter(Path(folder))
    layers = linear_layers(model)
    weights, experts = _split_experts(folder, config, stored, model)
    _check_layers(folder, config, weights, layers, required=not experts)
    options = LoraOptions(
        rank=config.r,
        alpha=config.lora_alpha,
        target_modules=_targets_of(config),
        target_parameters=tuple(config.target_parameters or ()),
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
    )
    initial_adapter = INITIAL_ADAPTERS.get(str(config.init_lora_weights).lower())
    if initial_adapter is not None:
        weights = {
            name: _subtract(adapter, initial_adapter(_float(layers[name]), config.r, options.scale))
            for name, adapter in weights.items()
        }
        # The scale alpha / rank (or alpha / √rank) must not change with the doubled rank.
        factor = math.sqrt(2) if options.use_rslora else 2.0
        options = evolve(options, rank=2 * options.rank, alpha=options.alpha * factor)
    # Separately trained adapters of gate and up matrices are fused, which doubles the rank.
    fused = {
        name: evolve(options, rank=adapter.a.shape[1], alpha=options.scale * adapter.a.shape[1])
        for name, adapter in experts.items()
        if adapter.a.shape[1] != options.rank
    }
    base = config.base_model_name_or_path or ""
    adapted = adapt(model, [*weights, *experts], options, base, fused)
    for name, layer in adapted.adapters().items():
        layer.load(experts[name] if name in experts else weights[name])
    return adapted


def _split_experts(
    folder: str | Path, config: AdapterConfig, stored: Weights, model: nn.Module
) -> tuple[dict[str, AdapterTensors], dict[str, AdapterTensors]]:
    """Return the adapters of linear layers, and of expert weights, by model names."""
    names_on_disk = PER_EXPERT.get(getattr(getattr(model, "config", None), "model_type", ""))
    if names_on_disk is not None and any(EXPERT.fullmatch(name) for name in stored):
        return _split_per_expert(folder, stored, model, names_on_disk)
    targets = config.target_parameters or []
    stacked = expert_weights(model) if targets else {}
    names = expert_modules(name for name in stacked if ends_with(name, targets))
    if targets and not names:
        raise ModelError(
            f"{folder}: target_parameters={targets} names no expert weights of the model; load it "
            "into the model it was trained for"
        )
    experts = {}
    for name, key in names.items():
        if key not in stored:
            raise ModelError(
                f"{folder}: it lacks the adapter of {name!r}; load it into the model it was "
                "trained for"
            )
        count, *outputs, inputs = stacked[name].shape
        shape = (math.prod(outputs), inputs)
        a, b, _ = stored[key]
        if (b.shape[0], *a.shape) != (shape[0], count * config.r, inputs):
            raise ModelError(
                f"{folder}: the adapter of {name!r} has shapes {tuple(a.shape)} and "
                f"{tuple(b.shape)}, and the model's weight has {count} experts of "
                f"{shape}; load it into the model it was trained for"
            )
        experts[name] = expert_tensors(stored[key], count)
    linear = {name: stored[name] for name in stored if name not in names.values()}
    return linear, experts


def _split_per_expert(
    folder: str | Path, stored: Weights, model: nn.Module, names: ExpertNames
) -> tuple[dict[str, AdapterTensors], dict[str, AdapterTensors]]:
    linear, experts = stack_experts(folder, stored, names)
    weights = expert_weights(model)
    for name, (a, b, _) in experts.items():
        if name not in weights:
            raise ModelError(
                f"{folder}: the model has no experts {name!r}; load it into the model it was "
                "trained for"
            )
        count, *outputs, inputs = weights[name].shape
        if (len(a), b.shape[1], a.shape[2]) != (count, math.prod(outputs), inputs):
            raise ModelError(
                f"{folder}: the adapter of {name!r} has {len(a)} experts of "
                f"{(b.shape[1], a.shape[2])}, and the model's weight has {count} experts of "
                f"{(math.prod(outputs), inputs)}; load it into the model it was trained for"
            )
    return linear, experts


def _float(layer: nn.Linear) -> Tensor:
    return layer.weight.detach().float()


def _targets_of(config: AdapterConfig) -> str | tuple[str, ...]:
    targets = config.target_modules
    return targets if isinstance(targets, str) else tuple(targets or ())


def _subtract(adapter: AdapterTensors, initial: tuple[Tensor, Tensor]) -> AdapterTensors:
    """Return A and B, of twice the rank, whose product is B·A - B₀·A₀."""
    a, b, magnitude = adapter
    a_0, b_0 = (tensor.to(a.device) for tensor in initial)
    # [B, -B₀] · [A; A₀] = B·A - B₀·A₀
    return AdapterTensors(torch.cat((a, a_0)), torch.cat((b, -b_0), 1), magnitude)


def _check_layers(
    folder: str | Path,
    config: AdapterConfig,
    weights: Mapping[str, AdapterTensors],
    layers: Mapping[str, nn.Linear],
    *,
    required: bool,
) -> None:
    """Check that the model has all adapted layers, before memory is allocated."""
    problem, targets = "", config.target_modules or []
    if not isinstance(targets, str):
        expected = {name for name in layers if ends_with(name, targets)}
        if missing_names := expected - weights.keys():
            problem = f"it lacks the adapter of {min(missing_names)!r}"
        elif extra := {name for name in weights if not ends_with(name, targets)}:
            problem = f"it has weights for {min(extra)!r}, which target_modules excludes"
    if unknown := weights.keys() - layers.keys():
        problem = f"the model has no linear layer {min(unknown)!r}"
    if problem or (required and not weights):
        problem = problem or "it has no weights"
        raise ModelError(f"{folder}: {problem}; load it into the model it was trained for")
    for name, (a, b, magnitude) in weights.items():
        shape = tuple(layers[name].weight.shape)
        sizes = (b.shape[0], a.shape[1])
        if sizes != shape or (magnitude is not None and len(magnitude) != shape[0]):
            raise ModelError(
                f"{folder}: the adapter of {name!r} has shapes {tuple(a.shape)} and "
                f"{tuple(b.shape)}, and the model's layer has {shape}; load it into the model it "
                "was trained for"
            )
