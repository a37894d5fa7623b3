"""Models and tokens of a run file."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ms_compress.errors import ConfigError, DataError, ExportError

__all__ = ["load", "read_tokens", "save"]


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


def read_tokens(dataset: str | Path, *, rows: int, length: int, split: str = "train") -> Tensor:
    """Rows of tokens (rows, length) int64 of a folder of ms-data's shards, or of a JSON file.

    Args:
        dataset: shards, or a JSON list of lists of token numbers.
        rows: how many.
        length: tokens of each.
        split: of the shards: `train` or `held_out`.

    Raises:
        DataError: there is too little, or it is no dataset.
    """
    path = Path(dataset)
    if path.is_file():
        flat = _from_json(path)
    else:
        flat = _from_shards(path, rows * length, split)
    if len(flat) < rows * length:
        raise DataError(f"{path}: {len(flat)} tokens, where {rows} rows of {length} are asked for")
    return torch.tensor(flat[: rows * length], dtype=torch.int64).view(rows, length)


def _from_json(path: Path) -> list[int]:
    try:
        document: Any = json.loads(path.read_text())
        return [int(token) for row in document for token in row]
    except (ValueError, TypeError, OSError) as error:
        raise DataError(f"{path}: not a JSON list of lists of tokens: {error}") from error


def _from_shards(path: Path, count: int, split: str) -> list[int]:
    try:
        import ms_data
    except ImportError as error:
        raise DataError("reading shards needs ms-data: pip install 'ms-compress[data]'") from error

    stream = ms_data.TokenStream(path, sequence_length=256, batch_size=1, split=split, epochs=1)
    flat: list[int] = []
    for batch in stream:
        flat += batch["tokens"][0].tolist()
        if len(flat) >= count:
            break
    return flat
