"""Loads and saves models with ms-parallel or transformers."""

import importlib.util
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from ms_align import processes
from ms_align.entry import one_line
from ms_align.errors import ConfigError, ModelError, NonFiniteError
from ms_align.files.durable import write_file, writing
from ms_align.files.model_name import missing_model
from ms_align.files.tokenizer_source import json_text
from ms_align.files.untrusted import check_file, check_parts, check_path, read_json
from ms_align.models.finite import check_module, first_not_finite
from ms_align.settings import short_repr

ADAPTER = "adapter_config.json"
FLOATS = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""Floating-point dtypes by their names in safetensors files."""


def folder_of(model: Any) -> Path | None:
    """Return the folder of a model that is given as one or was loaded from one; else None.

    For an adapter's folder, it is the folder of the base model.
    """
    path = model if isinstance(model, str | Path) else getattr(model, "name_or_path", None)
    if not path or not isinstance(path, str | Path):
        return None
    folder = Path(path)
    base = adapter_base(folder)
    return folder if base is None else folder_of(base)


def adapter_base(folder: Path) -> Path | None:
    """Return the base model's folder of an adapter's folder; None if it is not an adapter's.

    Raises:
        ModelError: adapter_config.json does not name an existing folder, or adapters refer to each
            other in a cycle.
    """
    base = _base_in_config(folder)
    visited, next_base = {folder.resolve()}, base
    while next_base is not None:  # the base model may be an adapter's folder itself
        if next_base.resolve() in visited:
            raise ModelError(
                f"{folder / ADAPTER}: base_model_name_or_path must lead to a model, and leads back "
                f"to {next_base}; set it to the folder of the base model"
            )
        visited.add(next_base.resolve())
        next_base = _base_in_config(next_base)
    return base


def _base_in_config(folder: Path) -> Path | None:
    path = folder / ADAPTER
    # With a config.json too, the folder holds a complete model.
    if not path.is_file() or (folder / "config.json").is_file():
        return None
    name = read_json(path, dict[str, Any], error=ModelError).get("base_model_name_or_path")
    if isinstance(name, str) and name:
        check_path(f"base_model_name_or_path of {path}", name, error=ModelError)
        # A relative name may be relative to the working directory or to the adapter.
        for base in (Path(name), folder / name):
            if base.is_dir():
                return base
    raise ModelError(
        f"{path}: base_model_name_or_path must be the folder of the base model, got "
        f"{short_repr(name)}; set it to that folder"
    )


def pick_device(name: str | None = None) -> torch.device:
    """Return a device by name. Default: this process's accelerator, or the CPU.

    Raises:
        ConfigError: this machine does not have the device.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name is not None and name != "cpu":
        device_type, _, number = name.partition(":")
        available = "no accelerator" if accelerator is None else accelerator.type
        if accelerator is None or accelerator.type != device_type:
            raise ConfigError(
                f"device must be one of this machine, which has {available}, got {name!r}"
            )
        if number and int(number) >= torch.accelerator.device_count():
            count = torch.accelerator.device_count()
            raise ConfigError(
                f"device must be below {device_type}:{count} on this machine, got {name!r}"
            )
        if number:
            return torch.device(name)
    if accelerator is None or name == "cpu":
        return torch.device("cpu")
    # torchrun sets LOCAL_RANK.
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count()
    return torch.device(accelerator.type, index)


def load_model(folder: str | Path, *, device: str | None = None) -> nn.Module:
    """Load the model in a Hugging Face folder, with ms-parallel if it supports the architecture.

    Args:
        folder: folder with config.json and weights, which are converted to float32.
        device: device of the model. Default: this process's accelerator, or the CPU.

    Raises:
        ModelError: the folder has no model, or the model cannot be loaded.
        ConfigError: neither ms-parallel nor transformers is installed, or the device is unknown.
    """
    check_path("a model", folder, error=ModelError)
    path = Path(folder)
    if (problem := missing_model(str(folder))) is not None:
        raise ModelError(f"the model must be a local folder: {problem}")
    if not (path / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json; use the folder of a model")
    target = pick_device(device)
    has_transformers = importlib.util.find_spec("transformers") is not None
    if importlib.util.find_spec("ms_parallel"):
        import ms_parallel

        try:
            return ms_parallel.load_model(path, device=target)
        except ms_parallel.ParallelError as error:
            # For an architecture that ms-parallel supports, its message is the accurate one.
            if not has_transformers or _is_supported(path) or _is_multimodal(path):
                raise ModelError(str(error)) from error
    if has_transformers:
        return check_module(path, _from_transformers(path)).to(target)
    raise ConfigError(
        f"reading the model in {folder} needs ms-parallel or transformers; install "
        "ms-align[parallel] or ms-align[hf]"
    )


def _is_supported(path: Path) -> bool:
    """Return True if ms-parallel has its own model for the architecture and can read the files."""
    from ms_parallel import ParallelError
    from ms_parallel.models import TransformersModel, architecture

    try:
        config = architecture(path)
    except ParallelError:
        return False
    return not isinstance(config, TransformersModel) and any(path.glob("*.safetensors"))


def _is_multimodal(path: Path) -> bool:
    """Return True for a model of images or audio, which needs ms-parallel's engine."""
    from ms_parallel.models import MultimodalModel

    document = read_json(path / "config.json", dict[str, Any], error=ModelError)
    return document.get("model_type") in MultimodalModel.model_types


def _from_transformers(path: Path) -> nn.Module:
    """Load a model with transformers; reject weights that it would initialize randomly."""
    from transformers import AutoModelForCausalLM

    check_parts(path, error=ModelError)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, output_loading_info=True, dtype=torch.float32
        )
    except Exception as error:  # transformers raises many types for damaged files
        reason = one_line(str(error))[:200]
        raise ModelError(f"{path} cannot be read: {reason}; check that it is complete") from error
    model, info = loaded
    for problem in ("missing_keys", "mismatched_keys"):
        if info[problem]:
            names = sorted(key if isinstance(key, str) else key[0] for key in info[problem])
            raise ModelError(
                f"{path} has {len(names)} {problem.replace('_', ' ')}, first {names[0]!r}, which "
                "would be initialized randomly; copy it again"
            )
    return cast(nn.Module, model)


def save_model(model: nn.Module, folder: Path, *, dtype: torch.dtype | None = None) -> None:
    """Save a model in its library's format, or a plain module as `model.safetensors`.

    Args:
        model: model to save; it is not changed.
        folder: folder to write.
        dtype: dtype of the saved parameters; buffers keep theirs. None: their own.

    Raises:
        CheckpointError: the folder cannot be written.
        NonFiniteError: a weight overflows in `dtype`.
    """
    with writing(folder):
        if hasattr(model, "save_pretrained"):
            if processes.rank() == 0:
                if dtype is None:
                    cast(Any, model).save_pretrained(folder)
                else:
                    cast(Any, model).save_pretrained(folder, state_dict=_converted(model, dtype))
                    _write_dtype(folder / "config.json", dtype)
        elif _is_staged(model):
            import ms_parallel

            ms_parallel.save_model(cast(Any, model), folder, dtype=dtype)
        elif processes.rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            unique = {}
            for name, tensor in _converted(model, dtype).items():
                # safetensors rejects tensors that share memory.
                unique[name] = tensor.detach().cpu().contiguous().clone()
            save_file(unique, folder / "model.safetensors")


def stored_dtype(folder: Path) -> torch.dtype | None:
    """Return the dtype of most weights in a model's folder; None if it is not floating-point.

    Quantized weights, such as FP8 with scales, also give None: a model trained from them is saved
    as float32.
    """
    counts: Counter[str] = Counter()
    with suppress(OSError, SafetensorError):
        for path in sorted(folder.glob("*.safetensors")):
            check_file(path, error=ModelError)
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    tensor_slice = file.get_slice(name)
                    counts[tensor_slice.get_dtype()] += math.prod(tensor_slice.get_shape())
    if not counts:  # other file formats
        config = read_json(folder / "config.json", dict[str, Any], error=ModelError)
        return getattr(torch, str(config.get("dtype", config.get("torch_dtype"))), None)
    return FLOATS.get(counts.most_common(1)[0][0])


def experts_of(model: Any) -> int | None:
    """Return the number of routed experts of a model or model folder; None for dense models."""
    counts = _config_counts(model, ("n_routed_experts", "num_local_experts", "num_experts"))
    return next((count for count in counts if count > 1), None)


def vocabulary_of(model: Any) -> int | None:
    """Return the vocabulary size in the configuration of a model or model folder, if it has one."""
    return next(_config_counts(model, ("vocab_size",)), None)


def _config_counts(model: Any, names: Sequence[str]) -> Iterator[int]:
    """Yield the integers under some names in a model's configuration."""
    config: Any = getattr(model, "config", None)
    if isinstance(model, str | Path):
        path = Path(model) / "config.json"
        config = read_json(path, dict[str, Any], error=ModelError) if path.is_file() else None
    # Multimodal models have the language model's settings in text_config.
    for section in (config, _value(config, "text_config")):
        for name in names:
            count = _value(section, name)
            if isinstance(count, int):
                yield count


def _value(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, dict) else getattr(config, name, None)


def _converted(model: nn.Module, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Return a state dict with parameters converted to a dtype."""
    state = model.state_dict()
    if dtype is None:
        return state
    # With duplicates, as tied parameters appear in the state dict under every name.
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    converted = {
        name: tensor.to(dtype) if name in names and tensor.is_floating_point() else tensor
        for name, tensor in state.items()
    }
    name = first_not_finite(converted)
    if name is not None:
        raise NonFiniteError(
            f"{name!r} must be finite in {str(dtype).removeprefix('torch.')} to be saved, and "
            "overflows; set save_dtype to float32"
        )
    return converted


def _write_dtype(path: Path, dtype: torch.dtype) -> None:
    """Set the dtype in a config.json."""
    document = read_json(path, dict[str, Any], error=ModelError)
    for config in (document, document.get("text_config")):
        for key in ("dtype", "torch_dtype"):
            if isinstance(config, dict) and key in config:
                config[key] = str(dtype).removeprefix("torch.")
    write_file(path, json_text(document))


def _is_staged(model: nn.Module) -> bool:
    """Return True for a model of ms-parallel."""
    if importlib.util.find_spec("ms_parallel") is None:
        return False
    from ms_parallel.models import StagedModel

    return isinstance(model, StagedModel)
