"""Models of a run file."""

import hashlib
from pathlib import Path

import torch
from torch import nn

from ms_compress.durable import writing
from ms_compress.errors import ConfigError, ExportError
from ms_compress.kept_training import DIGEST
from ms_compress.place_lock import new_folder

__all__ = ["digest", "load", "save"]

CONTENTS = (".json", ".safetensors", ".bin")
"""Files of a folder that its model follows from."""


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


def digest(folder: Path) -> str:
    """Of what a model's folder holds: another one after any change to it."""
    whole = hashlib.blake2b()
    for path in sorted(folder.iterdir()):
        if path.suffix in CONTENTS:
            with path.open("rb") as file:
                held = hashlib.file_digest(file, hashlib.blake2b).digest()
            whole.update(path.name.encode() + b"\0" + held)
    return DIGEST + whole.hexdigest()


def save(model: nn.Module, folder: Path) -> None:
    """Write a model's stored weights as a Hugging Face folder, whole or not at all.

    Raises:
        ExportError: the folder exists or cannot be written, or a weight is NaN or infinite.
    """
    for name, value in model.named_parameters():
        if strange := int((~value.detach().isfinite()).sum()):
            raise ExportError(
                f"{name}: {strange} of its values are NaN or infinite; look at the training, or at"
                " the folder that it was read from"
            )
    with new_folder(folder) as aside, writing(folder):
        if hasattr(model.config, "to_dict"):
            model.save_pretrained(aside)  # type: ignore[operator]
            return
        import ms_parallel

        ms_parallel.save_model(model, aside)  # type: ignore[arg-type]
