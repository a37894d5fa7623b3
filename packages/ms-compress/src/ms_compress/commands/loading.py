"""Models of a run file."""

from pathlib import Path

import torch
from torch import nn

from ms_compress.errors import ConfigError, ExportError

__all__ = ["load", "save"]


def load(folder: str | Path) -> nn.Module:
    """A Hugging Face folder's model: by ms-parallel where it is installed, else by transformers.

    Raises:
        ConfigError: the folder is none, or neither package is installed.
    """
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path} has no config.json; give a Hugging Face model folder")
    try:
        import ms_parallel
    except ImportError:
        return _load_with_transformers(path)
    model: nn.Module = ms_parallel.load_model(path)
    return model


def _load_with_transformers(path: Path) -> nn.Module:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"reading {path} needs ms-parallel or transformers: pip install 'ms-compress[parallel]'"
        ) from error
    model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
        path, local_files_only=True, dtype=torch.float32
    )
    return model


def save(model: nn.Module, folder: Path) -> None:
    """Write a model's stored weights as a Hugging Face folder.

    Raises:
        ExportError: the folder exists.
    """
    if folder.exists():
        raise ExportError(f"{folder} exists; remove it or choose another output_dir")
    if hasattr(model.config, "to_dict"):
        model.save_pretrained(folder)  # type: ignore[operator]
        return
    import ms_parallel

    ms_parallel.save_model(model, folder)  # type: ignore[arg-type]
