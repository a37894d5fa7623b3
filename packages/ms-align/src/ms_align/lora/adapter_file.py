"""LoRA adapters on disk in peft's format: `adapter_config.json`, `adapter_model.safetensors`.

A key of the configuration that could change the adapter's result and is not supported is rejected.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ms_align.errors import ModelError
from ms_align.files.durable import write_file, writing
from ms_align.files.untrusted import decoding, read_bytes, read_json
from ms_align.lora.layers import AdapterTensors
from ms_align.lora.options import MAX_ALPHA
from ms_align.models.finite import check_tensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
MAX_CONFIG_BYTES, MAX_WEIGHTS_BYTES = 1 << 22, 1 << 40

MATRICES = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
"""Endings of tensor names, in the order of `AdapterTensors`."""

Weights = Mapping[str, AdapterTensors]
"""Adapters by layer name; an expert weight's name ends with its parameter, such as `down_proj`."""


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Subset of peft's `LoraConfig` that is read and written; other keys have peft's defaults."""

    r: int
    lora_alpha: float
    target_modules: list[str] | str | None
    target_parameters: list[str] | None = None
    use_rslora: bool = False
    use_dora: bool = False
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
    {
        *("r", "lora_alpha", "target_modules", "target_parameters"),
        *("use_rslora", "use_dora", "base_model_name_or_path"),
    }
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
    modules = expert_modules(name for name, adapter in weights.items() if adapter.a.ndim == 3)
    for name, (a, b, magnitude) in weights.items():
        if a.ndim == 3:
            # A has the experts outermost, (E·r, I); B innermost, (O, r·E).
            a, b = a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)
        key = PREFIX + modules.get(name, name)
        for suffix, tensor in zip(MATRICES, (a, b, magnitude), strict=True):
            if tensor is not None:
                tensors[f"{key}.{suffix}"] = tensor.detach().cpu().contiguous()
    document = msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n"
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / WEIGHTS, save(tensors, {"format": "pt"}))
    write_file(folder / CONFIG, document)


def expert_modules(names: Iterable[str]) -> dict[str, str]:
    """Map the names of adapted expert weights to the names of their modules in peft's files.

    peft wraps an experts module once per adapted weight, in the order in which the module declares
    them, so the name of an inner wrapper ends with one `base_layer` per outer one.

    Args:
        names: names of expert weights, in the model's order.
    """
    by_module: dict[str, list[str]] = {}
    for name in names:
        by_module.setdefault(name.rpartition(".")[0], []).append(name)
    return {
        name: module + ".base_layer" * (len(members) - 1 - depth)
        for module, members in by_module.items()
        for depth, name in enumerate(members)
    }


def read_adapter(folder: Path) -> tuple[AdapterConfig, Weights]:
    """Read the adapter in a folder.

    Adapters of experts have peft's module names and 2-D tensors; see `expert_tensors`.

    Raises:
        ModelError: a file is missing or damaged, or the adapter uses an unsupported feature.
    """
    path = folder / CONFIG
    raw = read_json(path, dict[str, Any], error=ModelError, limit_bytes=MAX_CONFIG_BYTES)
    _refuse_unsupported(path, raw)
    with decoding(f"{path}, as a LoRA configuration of peft", error=ModelError):
        config = msgspec.convert({"target_modules": None, **raw}, AdapterConfig)
    content = read_bytes(folder / WEIGHTS, error=ModelError, limit_bytes=MAX_WEIGHTS_BYTES)
    try:
        tensors = load(content)
    except SafetensorError as error:
        raise ModelError(f"{folder / WEIGHTS} is damaged: {error}; copy it again") from error
    _check_numbers(path, config)
    return config, _adapters(folder / WEIGHTS, tensors, config)


def expert_tensors(tensors: AdapterTensors, experts: int) -> AdapterTensors:
    """Reshape a file's A (E·r, I) and B (O, r·E) to (E, r, I) and (E, O, r)."""
    a, b, _ = tensors
    return AdapterTensors(
        a.view(experts, -1, a.shape[1]), b.view(len(b), -1, experts).permute(2, 0, 1)
    )


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
    if not 0 < config.lora_alpha <= MAX_ALPHA:
        raise ModelError(
            f"{path}: lora_alpha must be above 0 and at most {MAX_ALPHA:g}, got "
            f"{config.lora_alpha:g}; copy the file again"
        )


def _adapters(
    path: Path, tensors: Mapping[str, Tensor], config: AdapterConfig
) -> dict[str, AdapterTensors]:
    """Collect the tensors of each layer, and check their rank."""
    check_tensors(path, tensors, error=ModelError)
    layers: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        suffix = next((suffix for suffix in MATRICES if key.endswith("." + suffix)), None)
        if not key.startswith(PREFIX) or suffix is None:
            raise ModelError(f"{path} has {key!r}, which is not part of a plain LoRA adapter")
        if tensor.ndim != (1 if suffix == "lora_magnitude_vector" else 2):
            raise _wrong_shape(path, key, tensor, config.r)
        name = key.removeprefix(PREFIX).removesuffix("." + suffix)
        layers.setdefault(name, {})[suffix] = tensor
    expected = [*MATRICES][: 3 if config.use_dora else 2]
    adapters = {}
    for name, matrices in layers.items():
        if sorted(matrices) != expected:
            raise ModelError(
                f"{path} must have {' and '.join(expected)} of {name!r} with use_dora="
                f"{config.use_dora}, got {' and '.join(sorted(matrices))}; copy both files again"
            )
        adapter = adapters[name] = AdapterTensors(*(matrices[suffix] for suffix in expected))
        rank, remainder = divmod(adapter.a.shape[0], config.r)
        # Dim 0 of A is the rank; for experts, the rank times the number of experts.
        if remainder or rank == 0 or (rank > 1 and not config.target_parameters):
            raise _wrong_shape(path, f"{PREFIX}{name}.lora_A.weight", adapter.a, config.r)
        if adapter.b.shape[1] != adapter.a.shape[0]:
            raise _wrong_shape(path, f"{PREFIX}{name}.lora_B.weight", adapter.b, config.r)
    return adapters


def _wrong_shape(path: Path, key: str, tensor: Tensor, rank: int) -> ModelError:
    return ModelError(
        f"{path}: {key!r} must have the rank {rank} of {CONFIG}, got shape {tuple(tensor.shape)}; "
        "copy both files again"
    )
