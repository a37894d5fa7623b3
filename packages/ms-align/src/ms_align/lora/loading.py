"""Adapters from peft's two files onto a model."""

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from attrs import evolve
from torch import Tensor, nn

from ms_align.errors import ModelError
from ms_align.files.untrusted import check_path
from ms_align.lora.adapter_file import AdapterConfig, read_adapter
from ms_align.lora.adapters import AdaptedModel, LoraOptions, adapt, ends_with, linear_layers
from ms_align.lora.initialisation import TAKEN_OUT


def load_lora(model: nn.Module, folder: str | Path) -> AdaptedModel:
    """Put the adapters of a folder in peft's format beside a model's layers.

    peft takes B₀·A₀ out of the weights for an adapter that began as `pissa` or `olora`. Here the
    weights stay, and B₀·A₀ is taken off by the adapter, whose rank is then twice the file's: the
    sums are the same, and switched off it leaves the model as it was.

    Args:
        model: the one they were trained for.
        folder: with `adapter_config.json` and `adapter_model.safetensors`.

    Raises:
        ModelError: the folder holds no LoRA adapter, one that needs what is not supported here
            (DoRA, trained biases or whole modules), or one that does not fit the model.
    """
    check_path("an adapter", folder, error=ModelError)
    config, weights = read_adapter(Path(folder))
    layers = linear_layers(model)
    _check_layers(folder, config, weights, layers)
    options = LoraOptions(
        rank=config.r,
        alpha=config.lora_alpha,
        targets=_targets_of(config),
        rslora=config.use_rslora,
    )
    take_out = TAKEN_OUT.get(str(config.init_lora_weights).lower())
    if take_out is not None:
        weights = {
            name: _without(pair, take_out(_float(layers[name]), config.r, options.scale))
            for name, pair in weights.items()
        }
        grown = math.sqrt(2) if options.rslora else 2.0
        options = evolve(options, rank=2 * options.rank, alpha=options.alpha * grown)
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


def _without(pair: tuple[Tensor, Tensor], taken: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Build A and B of B·A - B₀·A₀."""
    (a, b), (a_taken, b_taken) = pair, taken
    device = a.device
    return torch.cat((a, a_taken.to(device))), torch.cat((b, -b_taken.to(device)), 1)


def _check_layers(
    folder: str | Path,
    config: AdapterConfig,
    weights: Mapping[str, tuple[Tensor, Tensor]],
    layers: Mapping[str, nn.Linear],
) -> None:
    """Refuse adapters that the model has no layers for, before any memory is taken for them."""
    problem = ""
    if not isinstance(config.target_modules, str):
        wanted = {name for name in layers if ends_with(name, config.target_modules)}
        if lacking := wanted - weights.keys():
            problem = f"the folder lacks {min(lacking)!r}"
        elif more := {name for name in weights if not ends_with(name, config.target_modules)}:
            problem = f"its target_modules leave out {min(more)!r}, of which it has weights"
    if foreign := weights.keys() - layers.keys():
        problem = f"the model has no linear layer {min(foreign)!r}"
    if problem or not weights:
        problem = problem or "it holds no weights"
        raise ModelError(f"{folder}: {problem}; load it into the model it was trained for")
    for name, (a, b) in weights.items():
        shape = tuple(layers[name].weight.shape)
        if (b.shape[0], a.shape[1]) != shape:
            raise ModelError(
                f"{folder}: adapter of {name!r} has shapes {tuple(a.shape)} and {tuple(b.shape)}, "
                f"and the model's layer {shape}; load it into the model it was trained for"
            )
