"""Loading and saving the models that a run file names."""

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
from ms_compress.place_lock import new_folder
from ms_compress.targets.libraries import import_library


def load(folder: str | Path) -> nn.Module:
    """Load a Hugging Face folder's model, by ms-parallel if it is installed, else by transformers.

    It lies on the machine's accelerator, where there is one.

    Raises:
        ConfigError: the folder is none, or neither package is installed.
        ExportError: a value is NaN or infinite.
    """
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path} has no config.json; give a Hugging Face model folder")
    read_config(path)
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
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if found is None else found


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


def save(model: nn.Module, folder: Path, *, beside: Path, last: Callable[[Path], object]) -> None:
    """Write a model's stored weights as a Hugging Face folder, whole or not at all.

    They get the base model's dtype, though they are trained in float32.

    Args:
        model: of ms-parallel or transformers.
        folder: must not exist.
        beside: the folder of the model that it was made from, whose tokenizer, license and
            generation settings go with it.
        last: is given the folder once all else is in it, before it has its name.

    Raises:
        ExportError: the folder exists or cannot be written, or a value is NaN or infinite.
    """
    check_finite(model, failed=True)
    dtype = _stored_dtype(beside)
    with new_folder(folder) as aside, writing(folder):
        if hasattr(model.config, "to_dict"):
            (model if dtype is None else model.to(dtype)).save_pretrained(aside)  # type: ignore[operator]
        else:
            import ms_parallel

            ms_parallel.save_model(model, aside, dtype=dtype)  # type: ignore[arg-type]
        _write_assets(aside, beside)
        last(aside)


def check_finite(model: nn.Module, *, failed: bool = False) -> None:
    """Refuse a model with NaN or infinite values, and name the tensor.

    Args:
        model: is looked at.
        failed: it became so here: the run has failed, and was not given bad input.

    Raises:
        ExportError: a parameter or a kept buffer has NaN or infinity.
    """
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor) or bool(value.isfinite().all()):
            continue
        kind = DivergedError if failed else ExportError
        raise kind(
            f"{name}: {int((~value.isfinite()).sum())} of its values are NaN or infinite; look at"
            " the training, or at the folder that it was read from"
        )


def _write_assets(folder: Path, source: Path) -> None:
    """Write the source model's tokenizer and how its texts end, in each file that says it."""
    config = read_config(folder)
    before = dict(config)
    tokenizer = source / "tokenizer.json"
    given = tokenizer if tokenizer.is_file() else None
    assets = read_assets(config, given, must_fit=False)
    if config != before:
        text = json.dumps(config, indent=2, sort_keys=True)
        write_file(folder / "config.json", text.encode() + b"\n")
    write_assets(assets, folder)
    carry_files(source, folder)


def _stored_dtype(folder: Path) -> torch.dtype | None:
    """Return the dtype that a folder's config.json states; None if it states none."""
    config = read_config(folder)
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), None)
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else None
