"""LoRA adapters on disk in peft's format: `adapter_config.json`, `adapter_model.safetensors`.

A key of the configuration that could change the adapter's result and is not supported is rejected.
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
"""Upper bound for alpha; beyond it the update would lose precision in float32."""
LARGEST_CONFIG_BYTES, LARGEST_WEIGHTS_BYTES = 1 << 22, 1 << 40

Weights = Mapping[str, tuple[Tensor, Tensor]]
"""A (r, I) and B (O, r) by layer name."""


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Subset of peft's `LoraConfig` that is read and written; other keys have peft's defaults."""

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


UNSET_VALUES: tuple[object, ...] = (None, False, "", [], {})
"""Values that leave any feature unused."""
ANY_VALUE: tuple[object, ...] = ()
"""For keys whose value does not affect the result of an adapter."""
SUPPORTED_KEYS = frozenset(
    {"r", "lora_alpha", "target_modules", "use_rslora", "base_model_name_or_path"}
)
NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "task_type": (None, "CAUSAL_LM", "FEATURE_EXTRACTION"),
    "bias": ("none",),
    # These initializations do not change the base weights, and training overwrites the adapter.
    # The last two do change them and are recomputed (see `load_lora`).
    "init_lora_weights": (
        *(None, True, False, "gaussian", "eva", "orthogonal", "mica"),
        *("pissa", "olora"),
    ),
    "auto_mapping": ANY_VALUE,
    "peft_version": ANY_VALUE,
    "revision": ANY_VALUE,
    "inference_mode": ANY_VALUE,
    # Models run in evaluation mode.
    "lora_dropout": ANY_VALUE,
    # Used only to initialize adapters with the method in the key's name.
    "corda_config": ANY_VALUE,
    "eva_config": ANY_VALUE,
    "loftq_config": ANY_VALUE,
    "lora_ga_config": ANY_VALUE,
    # Without effect unless `megatron_config` or `use_qalora` is set.
    "megatron_core": ANY_VALUE,
    "qalora_group_size": ANY_VALUE,
}
"""Values of a plain LoRA adapter by key; all other keys must be unset."""


def write_adapter(folder: Path, config: AdapterConfig, weights: Weights) -> None:
    """Write both files atomically, the configuration last.

    Raises:
        CheckpointError: the folder cannot be written.
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
    """Read the adapter in a folder.

    Raises:
        ModelError: a file is missing or damaged, or the adapter uses an unsupported feature.
    """
    path = folder / CONFIG
    raw = read_json(path, dict[str, Any], error=ModelError, limit_bytes=LARGEST_CONFIG_BYTES)
    _refuse_unsupported(path, raw)
    with decoding(f"{path}, as a LoRA configuration of peft", error=ModelError):
        config = msgspec.convert(raw, AdapterConfig)
    content = read_bytes(folder / WEIGHTS, error=ModelError, limit_bytes=LARGEST_WEIGHTS_BYTES)
    try:
        tensors = load(content)
    except SafetensorError as error:
        raise ModelError(f"{folder / WEIGHTS} is damaged: {error}; copy it again") from error
    _check_numbers(path, config)
    return config, _pairs(folder / WEIGHTS, tensors, config.r)


def _refuse_unsupported(path: Path, raw: Mapping[str, Any]) -> None:
    for key, value in raw.items():
        allowed = NEUTRAL_VALUES.get(key, UNSET_VALUES)
        # peft ignores the case of some of these names.
        text = value.lower() if key == "init_lora_weights" and isinstance(value, str) else value
        if (
            key in SUPPORTED_KEYS
            or allowed is ANY_VALUE
            or any(_same(text, option) for option in allowed)
        ):
            continue
        raise ModelError(
            f"{path} has {key}={repr(value)[:80]}, which is not supported; merge the adapter "
            "with peft and load the merged model"
        )


def _same(value: object, option: object) -> bool:
    """Return True if two values are equal and of the same type, so that 1 is not True."""
    return type(value) is type(option) and value == option


def _check_numbers(path: Path, config: AdapterConfig) -> None:
    if config.r < 1:
        raise ModelError(f"{path}: r must be at least 1, got {config.r}; copy the file again")
    if not 0 < config.lora_alpha <= LARGEST_ALPHA:
        raise ModelError(
            f"{path}: lora_alpha must be above 0 and at most {LARGEST_ALPHA:g}, got "
            f"{config.lora_alpha:g}; copy the file again"
        )


def _pairs(
    path: Path, tensors: Mapping[str, Tensor], rank: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """Pair A and B by layer, and check that their rank is the one in the configuration."""
    check_tensors(path, tensors, error=ModelError)
    layers: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, matrix = key.removeprefix(PREFIX).removesuffix(".weight").rpartition(".")
        if not key.startswith(PREFIX) or matrix not in ("lora_A", "lora_B"):
            raise ModelError(f"{path} has {key!r}, which is not part of a plain LoRA adapter")
        if tensor.ndim != 2 or tensor.shape[0 if matrix == "lora_A" else 1] != rank:
            raise ModelError(
                f"{path}: {key!r} must have the rank {rank} of {CONFIG}, got shape "
                f"{tuple(tensor.shape)}; copy both files again"
            )
        layers.setdefault(name, {})[matrix] = tensor
    for name, pair in layers.items():
        if len(pair) != 2:
            raise ModelError(f"{path} lacks A or B of {name!r}; copy it again")
    return {name: (pair["lora_A"], pair["lora_B"]) for name, pair in layers.items()}
