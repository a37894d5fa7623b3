"""Tokens to calibrate, train and evaluate on, out of a folder of ms-data's shards."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ms_compress.errors import ConfigError, DataError

__all__ = ["batches", "read_tokens", "rows"]


def batches(
    folder: str | Path,
    *,
    split: str,
    sequence_length: int,
    batch_size: int,
    seed: int = 0,
) -> Iterator[dict[str, Tensor]]:
    """Batches without end, each with `tokens` and `targets`, (B, S) int64.

    Documents follow one another as plain text, as every runtime reads them.

    Raises:
        ConfigError: ms-data is not installed.
        DataError: the folder holds no shards, not this split, or too little of it.
    """
    stream = _stream(folder, split, sequence_length, batch_size, seed)
    for batch in stream:
        yield {name: torch.as_tensor(batch[name]).long() for name in ("tokens", "targets")}


def rows(
    folder: str | Path, *, split: str, sequence_length: int, count: int, seed: int = 0
) -> dict[str, Tensor]:
    """The first so many rows of a split in the order of a seed, fewer if there are no more.

    Raises:
        DataError: as of `batches`.
    """
    stream = _stream(folder, split, sequence_length, 1, seed)
    taken = [next(stream) for _ in range(min(count, stream.samples_per_epoch))]
    return {
        name: torch.cat([torch.as_tensor(each[name]).long() for each in taken])
        for name in ("tokens", "targets")
    }


def read_tokens(dataset: str | Path, *, count: int, length: int) -> Tensor:
    """Rows of tokens (count, length) int64 to train on.

    Args:
        dataset: a folder of ms-data's shards with a split `train`, or a JSON list of lists of
            token numbers.
        count: how many rows.
        length: tokens of each.

    Raises:
        DataError: there is too little, or it is no dataset.
    """
    path = Path(dataset)
    if not path.is_file():
        stream = _stream(path, "train", length, 1, 0)
        _check_rows(path, stream.samples_per_epoch, count, length)
        return rows(path, split="train", sequence_length=length, count=count)["tokens"]
    flat = _from_json(path)
    _check_rows(path, len(flat) // length, count, length)
    return flat[: count * length].view(count, length)


def _check_rows(path: Path, there: int, count: int, length: int) -> None:
    if there < count:
        raise DataError(
            f"{path}: it has {there} rows of {length} tokens, where {count} rows are asked for;"
            " lower rows or sequence_length"
        )


def _from_json(path: Path) -> Tensor:
    try:
        document: Any = json.loads(path.read_text())
        return torch.tensor([int(token) for row in document for token in row], dtype=torch.int64)
    except (ValueError, TypeError, OSError, RuntimeError, OverflowError) as error:
        raise DataError(f"{path}: not a JSON list of lists of tokens: {error}") from error


def _stream(folder: str | Path, split: str, length: int, batch_size: int, seed: int) -> Any:
    try:
        import ms_data
    except ImportError as error:
        raise ConfigError(
            "reading shards needs ms-data; install it: pip install 'ms-compress[data]'"
        ) from error
    if not (Path(folder) / "index.json").is_file():
        raise DataError(f"{folder}: no shards are in it; build them with ms-data build")
    known = ms_data.inspect(folder).splits
    if split not in known:
        raise DataError(
            f"{folder}: it has no split {split!r} but {', '.join(sorted(known))}; build it with"
            " --hold-out"
        )
    return ms_data.TokenStream(
        folder, sequence_length=length, batch_size=batch_size, split=split, seed=seed
    )
