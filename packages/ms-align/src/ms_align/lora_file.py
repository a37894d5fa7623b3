"""Adapters on disk in peft's format: `adapter_config.json` and `adapter_model.safetensors`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ms_align.durable import sync_folder, write_synced, writing
from ms_align.errors import ModelError

__all__ = ["AdapterConfig", "read_adapter", "write_adapter"]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
LARGEST_CONFIG_BYTES = 1 << 22

Weights = Mapping[str, tuple[Tensor, Tensor]]
"""A (r, I) and B (O, r) by the layer's name in the model."""


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What of peft's `LoraConfig` is read and written; other keys are peft's own defaults."""

    r: int
    lora_alpha: float
    target_modules: list[str] | str
    use_rslora: bool = False
    base_model_name_or_path: str | None = None
    peft_type: str = "LORA"
    task_type: str | None = "CAUSAL_LM"
    bias: str = "none"
    lora_dropout: float = 0.0
    """Kept; models run without dropout here."""
    fan_in_fan_out: bool = False
    inference_mode: bool = True
    use_dora: bool = False
    modules_to_save: list[str] | None = None
    rank_pattern: dict[str, Any] = {}
    alpha_pattern: dict[str, Any] = {}
    lora_bias: bool = False
    layers_to_transform: list[int] | int | None = None


def write_adapter(folder: Path, config: AdapterConfig, weights: Weights) -> None:
    """Write both files, the configuration last, each whole or not at all.

    Raises:
        CheckpointError: the place cannot be written.
    """
    tensors = {}
    for name, (a, b) in weights.items():
        tensors[f"{PREFIX}{name}.lora_A.weight"] = a.detach().cpu().contiguous()
        tensors[f"{PREFIX}{name}.lora_B.weight"] = b.detach().cpu().contiguous()
    document = msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n"
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in ((WEIGHTS, save(tensors, {"format": "pt"})), (CONFIG, document)):
            aside = folder / f"{name}.partial"
            write_synced(aside, content)
            aside.replace(folder / name)
        sync_folder(folder)


def read_adapter(folder: Path) -> tuple[AdapterConfig, Weights]:
    """What the folder holds.

    Raises:
        ModelError: a file is missing or damaged, or the adapter needs what is not supported.
    """
    path = folder / CONFIG
    try:
        if path.stat().st_size > LARGEST_CONFIG_BYTES:
            raise ModelError(f"{path} is larger than any adapter's configuration")
        config = msgspec.json.decode(path.read_bytes(), type=AdapterConfig)
        tensors = load((folder / WEIGHTS).read_bytes())
    except OSError as error:
        raise ModelError(f"{folder} holds no adapter in peft's format: {error}") from error
    except msgspec.MsgspecError as error:
        raise ModelError(f"{path} is no LoRA configuration of peft: {error}") from error
    except SafetensorError as error:
        raise ModelError(f"{folder / WEIGHTS} is damaged: {error}; copy it again") from error
    _refuse_unsupported(path, config)
    return config, _pairs(folder / WEIGHTS, tensors)


def _refuse_unsupported(path: Path, config: AdapterConfig) -> None:
    plain = AdapterConfig(r=1, lora_alpha=1.0, target_modules=[])
    names = (
        "peft_type",
        "bias",
        "use_dora",
        "fan_in_fan_out",
        "modules_to_save",
        "rank_pattern",
        "alpha_pattern",
        "lora_bias",
        "layers_to_transform",
    )
    for name in names:
        value = getattr(config, name)
        if value and value != getattr(plain, name):
            raise ModelError(
                f"{path} has {name}={value!r}, which is not supported here; merge the adapter with "
                "peft and load the merged model"
            )
    if config.r < 1:
        raise ModelError(f"{path} has r={config.r}; it must be 1 or more")


def _pairs(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, kind = key.removeprefix(PREFIX).removesuffix(".weight").rpartition(".")
        if not key.startswith(PREFIX) or kind not in ("lora_A", "lora_B"):
            raise ModelError(f"{path} holds {key!r}, which is no part of a plain LoRA adapter")
        found.setdefault(name, {})[kind] = tensor
    for name, parts in found.items():
        if len(parts) != 2:
            raise ModelError(f"{path} lacks one of the two matrices of {name!r}; copy it again")
    return {name: (parts["lora_A"], parts["lora_B"]) for name, parts in found.items()}
