"""Load and save the models named in a run file."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from ms_compress.deployment.assets import carry_files, read_assets, write_assets
from ms_compress.errors import ConfigError, DivergedError, ExportError
from ms_compress.files.durable import write_file, writing
from ms_compress.files.untrusted import check_parts
from ms_compress.models.config_file import read_config
from ms_compress.output_lock import new_folder
from ms_compress.targets.libraries import import_library

DEQUANTIZED = ("fp8", "mxfp4")
"""Quantization methods of folders that ms-parallel reads as float weights."""


def load(folder: str | Path) -> nn.Module:
    """Load the model of a Hugging Face folder with ms-parallel, or else with transformers.

    The model is moved to the accelerator, if available.

    Raises:
        ConfigError: it is not a model folder, or neither package is installed.
        ExportError: a value is NaN or infinite.
    """
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path} has no config.json; use a Hugging Face model folder")
    settings = read_config(path).get("quantization_config") or {}
    quantized = settings.get("quant_method", "") if isinstance(settings, dict) else settings
    if quantized not in ("", *DEQUANTIZED):
        raise ConfigError(
            f"{path} must have float weights, got weights quantized by {quantized!r}; use the"
            " folder of its base model"
        )
    try:
        import ms_parallel
    except ImportError:
        return _load_with_transformers(path)
    from ms_parallel.errors import ModelError

    try:
        model: nn.Module = ms_parallel.load_model(path, device=_best_device())
    except ModelError as error:
        raise ExportError(str(error)) from error
    check_finite(model)
    return model


def _best_device() -> torch.device:
    device = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if device is None else device


def _load_with_transformers(path: Path) -> nn.Module:
    purpose = f"reading {path} needs ms-parallel or transformers"
    transformers = import_library(
        "transformers", extra="parallel", purpose=purpose, error=ConfigError
    )
    check_parts(path, error=ConfigError)
    model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
        path, local_files_only=True, dtype=torch.float32
    )
    check_finite(model)
    return model.to(_best_device())


def save(
    model: nn.Module, folder: Path, *, source: Path, before_publish: Callable[[Path], object]
) -> None:
    """Save a model's stored weights as a Hugging Face folder that appears complete or not at all.

    Weights are stored in the source model's dtype, though they are trained in float32.

    Args:
        model: model from ms-parallel or transformers.
        folder: output folder; must not exist.
        source: folder of the model it is derived from, whose tokenizer, license and generation
            settings are copied.
        before_publish: called with the complete folder before it gets its final name.

    Raises:
        ExportError: the folder exists or cannot be written, or a value is NaN or infinite.
    """
    check_finite(model, failed=True)
    dtype = _stored_dtype(source)
    with new_folder(folder) as partial, writing(folder):
        # A model of transformers; ms-parallel's configurations are attrs classes.
        if hasattr(model.config, "to_dict"):
            (model if dtype is None else model.to(dtype)).save_pretrained(partial)  # type: ignore[operator]
        else:
            import ms_parallel

            ms_parallel.save_model(model, partial, dtype=dtype)  # type: ignore[arg-type]
        _write_assets(partial, source)
        before_publish(partial)


def check_finite(model: nn.Module, *, failed: bool = False) -> None:
    """Check that a model has no NaN or infinite values, and name the tensor otherwise.

    Args:
        model: model to check.
        failed: whether the model was trained in this run, so that the run failed, rather than
            getting bad input.

    Raises:
        ExportError: a parameter or persistent buffer has NaN or infinity.
    """
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor) or bool(value.isfinite().all()):
            continue
        error_type = DivergedError if failed else ExportError
        raise error_type(
            f"{name}: {int((~value.isfinite()).sum())} of its values are NaN or infinite; check"
            " the training, or the folder that it was loaded from"
        )


def _write_assets(folder: Path, source: Path) -> None:
    """Copy the source model's tokenizer, and write its end tokens wherever they are read."""
    config = read_config(folder)
    original = dict(config)
    default_path = source / "tokenizer.json"
    tokenizer_path = default_path if default_path.is_file() else None
    assets = read_assets(config, tokenizer_path, must_fit=False)
    if config != original:
        text = json.dumps(config, indent=2, sort_keys=True)
        write_file(folder / "config.json", text.encode() + b"\n")
    write_assets(assets, folder)
    carry_files(source, folder)


def _stored_dtype(folder: Path) -> torch.dtype | None:
    """Return the dtype in a folder's config.json, or None if it has none."""
    config = read_config(folder)
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), None)
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else None
