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
from ms_align.lora.adapter_file import AdapterConfig, read_adapter
from ms_align.lora.adapters import AdaptedModel, LoraOptions, adapt, ends_with, linear_layers
from ms_align.lora.initialization import INITIAL_ADAPTERS


def load_lora(model: nn.Module, folder: str | Path) -> AdaptedModel:
    """Add the adapters in a folder of peft's format to a model, in place.

    For `pissa` and `olora`, peft subtracts s·B₀·A₀ from the weights. Here the weights stay
    unchanged and the adapter includes -s·B₀·A₀, which doubles its rank. The results are the same,
    and with the adapter disabled the model equals its base.

    Args:
        model: base model that the adapters were trained for.
        folder: folder with `adapter_config.json` and `adapter_model.safetensors`.

    Raises:
        ModelError: the folder has no LoRA adapter, or an unsupported one (DoRA, trained biases or
            modules), or it does not match the model.
    """
    check_path("an adapter", folder, error=ModelError)
    check_type("model", model, nn.Module, "a torch.nn.Module", error=ModelError)
    config, weights = read_adapter(Path(folder))
    layers = linear_layers(model)
    _check_layers(folder, config, weights, layers)
    options = LoraOptions(
        rank=config.r,
        alpha=config.lora_alpha,
        target_modules=_targets_of(config),
        use_rslora=config.use_rslora,
    )
    initial_adapter = INITIAL_ADAPTERS.get(str(config.init_lora_weights).lower())
    if initial_adapter is not None:
        weights = {
            name: _subtract(pair, initial_adapter(_float(layers[name]), config.r, options.scale))
            for name, pair in weights.items()
        }
        # The scale alpha / rank (or alpha / √rank) must not change with the doubled rank.
        factor = math.sqrt(2) if options.use_rslora else 2.0
        options = evolve(options, rank=2 * options.rank, alpha=options.alpha * factor)
    adapted = adapt(model, list(weights), options, config.base_model_name_or_path or "")
    with torch.no_grad():
        for name, layer in adapted.adapters().items():
            layer.lora_A.copy_(weights[name][0])
            layer.lora_B.copy_(weights[name][1])
    return adapted


def _float(layer: nn.Linear) -> Tensor:
    return layer.weight.detach().float()


def _targets_of(config: AdapterConfig) -> str | tuple[str, ...]:
    targets = config.target_modules
    return targets if isinstance(targets, str) else tuple(targets)


def _subtract(pair: tuple[Tensor, Tensor], initial: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return A and B of B·A - B₀·A₀, of twice the rank."""
    (a, b), (a_0, b_0) = pair, initial
    device = a.device
    # [B, -B₀] · [A; A₀] = B·A - B₀·A₀
    return torch.cat((a, a_0.to(device))), torch.cat((b, -b_0.to(device)), 1)


def _check_layers(
    folder: str | Path,
    config: AdapterConfig,
    weights: Mapping[str, tuple[Tensor, Tensor]],
    layers: Mapping[str, nn.Linear],
) -> None:
    """Check that the model has all adapted layers, before memory is allocated."""
    problem = ""
    if not isinstance(config.target_modules, str):
        expected = {name for name in layers if ends_with(name, config.target_modules)}
        if missing_names := expected - weights.keys():
            problem = f"it lacks the adapter of {min(missing_names)!r}"
        elif extra := {name for name in weights if not ends_with(name, config.target_modules)}:
            problem = f"it has weights for {min(extra)!r}, which target_modules excludes"
    if unknown := weights.keys() - layers.keys():
        problem = f"the model has no linear layer {min(unknown)!r}"
    if problem or not weights:
        problem = problem or "it has no weights"
        raise ModelError(f"{folder}: {problem}; load it into the model it was trained for")
    for name, (a, b) in weights.items():
        shape = tuple(layers[name].weight.shape)
        if (b.shape[0], a.shape[1]) != shape:
            raise ModelError(
                f"{folder}: the adapter of {name!r} has shapes {tuple(a.shape)} and "
                f"{tuple(b.shape)}, and the model's layer has {shape}; load it into the model it "
                "was trained for"
            )
