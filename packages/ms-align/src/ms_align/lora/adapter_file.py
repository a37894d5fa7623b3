"""Adapters on disk in peft's format: `adapter_config.json` and `adapter_model.safetensors`.

A key of the configuration that is neither read nor known to change nothing is refused by its name.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ms_align.errors import ModelError
from ms_align.files.durable import write_file, writing
from ms_align.files.untrusted import decoding, read_bytes, read_json
from ms_align.models.finite import check_tensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
LARGEST_ALPHA = 1e6
"""More than any adapter is trained with; float32 would lose what is added to it."""
LARGEST_CONFIG_BYTES, LARGEST_WEIGHTS_BYTES = 1 << 22, 1 << 40

Weights = Mapping[str, tuple[Tensor, Tensor]]
"""A (r, I) and B (O, r) by the layer's name in the model."""


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What of peft's `LoraConfig` is read and written; other keys are peft's own defaults."""

    r: int
    lora_alpha: float
    target_modules: list[str] | str
    use_rslora: bool = False
    base_model_name_or_path: str | None = None
    init_lora_weights: bool | str | None = True
    peft_type: str = "LORA"
    task_type: str | None = "CAUSAL_LM"
    bias: str = "none"
    lora_dropout: float = 0.0
    fan_in_fan_out: bool = False
    inference_mode: bool = True


EMPTY: tuple[object, ...] = (None, False, "", [], {})
"""Values that ask for nothing, whatever their key."""
ANYTHING: tuple[object, ...] = ()
"""A key whose value never changes what an adapter computes."""
READ = frozenset({"r", "lora_alpha", "target_modules", "use_rslora", "base_model_name_or_path"})
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "task_type": (None, "CAUSAL_LM", "FEATURE_EXTRACTION"),
    "bias": ("none",),
    # Such initial weights leave the model's weights alone, and are overwritten by what was trained;
    # the last two are made again (see `lora_begin`).
    "init_lora_weights": (
        *(None, True, False, "gaussian", "eva", "orthogonal", "mica"),
        *("pissa", "olora"),
    ),
    "auto_mapping": ANYTHING,
    "peft_version": ANYTHING,
    "revision": ANYTHING,
    "inference_mode": ANYTHING,
    # Models run in evaluation mode.
    "lora_dropout": ANYTHING,
    # Read while an adapter is initialised, and only for the way that bears its name.
    "corda_config": ANYTHING,
    "eva_config": ANYTHING,
    "loftq_config": ANYTHING,
    "lora_ga_config": ANYTHING,
    # Nothing without `megatron_config` and `use_qalora`.
    "megatron_core": ANYTHING,
    "qalora_group_size": ANYTHING,
}
"""By key, the values with which an adapter is a plain one; a key that is not here must be empty."""


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
    write_file(folder / WEIGHTS, save(tensors, {"format": "pt"}))
    write_file(folder / CONFIG, document)


def read_adapter(folder: Path) -> tuple[AdapterConfig, Weights]:
    """Read the adapter that the folder holds.

    Raises:
        ModelError: a file is missing or damaged, or the adapter needs what is not supported.
    """
    path = folder / CONFIG
    given = read_json(path, dict[str, Any], error=ModelError, limit_bytes=LARGEST_CONFIG_BYTES)
    _refuse_unsupported(path, given)
    with decoding(f"{path}, as a LoRA configuration of peft", error=ModelError):
        config = msgspec.convert(given, AdapterConfig)
    content = read_bytes(folder / WEIGHTS, error=ModelError, limit_bytes=LARGEST_WEIGHTS_BYTES)
    try:
        tensors = load(content)
    except SafetensorError as error:
        raise ModelError(f"{folder / WEIGHTS} is damaged: {error}; copy it again") from error
    _check_numbers(path, config)
    return config, _pairs(folder / WEIGHTS, tensors, config.r)


def _refuse_unsupported(path: Path, given: Mapping[str, Any]) -> None:
    for key, value in given.items():
        allowed = NEUTRAL.get(key, EMPTY)
        word = value.lower() if key == "init_lora_weights" and isinstance(value, str) else value
        if key in READ or allowed is ANYTHING or any(_same(word, one) for one in allowed):
            continue
        raise ModelError(
            f"{path} has {key}={repr(value)[:80]}, which is not supported here; merge the adapter "
            "with peft and load the merged model"
        )


def _same(one: object, other: object) -> bool:
    """Return whether two values are equal, with no number taken for a truth value."""
    return type(one) is type(other) and one == other


def _check_numbers(path: Path, config: AdapterConfig) -> None:
    if config.r < 1:
        raise ModelError(f"{path} has r={config.r}; it must be 1 or more")
    if not 0 < config.lora_alpha <= LARGEST_ALPHA:
        raise ModelError(
            f"{path}: lora_alpha must be above 0 and at most {LARGEST_ALPHA:g}, got "
            f"{config.lora_alpha:g}; copy the file again"
        )


def _pairs(
    path: Path, tensors: Mapping[str, Tensor], rank: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """Pair A and B by layer, and check that both have the rank that the configuration names."""
    check_tensors(path, tensors, error=ModelError)
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, kind = key.removeprefix(PREFIX).removesuffix(".weight").rpartition(".")
        if not key.startswith(PREFIX) or kind not in ("lora_A", "lora_B"):
            raise ModelError(f"{path} holds {key!r}, which is no part of a plain LoRA adapter")
        if tensor.ndim != 2 or tensor.shape[0 if kind == "lora_A" else 1] != rank:
            raise ModelError(
                f"{path}: {key!r} has shape {tuple(tensor.shape)} and "
                f"{CONFIG} r={rank}; copy both files again"
            )
        found.setdefault(name, {})[kind] = tensor
    for name, parts in found.items():
        if len(parts) != 2:
            raise ModelError(f"{path} lacks one of the two matrices of {name!r}; copy it again")
    return {name: (parts["lora_A"], parts["lora_B"]) for name, parts in found.items()}
