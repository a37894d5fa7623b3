"""Rows of text to calibrate, train and evaluate on: plain text, or conversations.

A dataset is a folder of ms-data's shards, of text or of conversations, a JSON list of lists of
tokens, or a file of conversations, which the model folder's chat template renders. A row
holds one conversation from its first token on, and its loss is that of the answers alone; so every
runtime reads it alike, as none has to know where in a row another conversation begins.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
from msgspec import Meta
from torch import Tensor

from ms_compress.errors import ConfigError, DataError
from ms_compress.files.untrusted import read_json
from ms_compress.targets.libraries import import_library

logger = logging.getLogger(__name__)

TOKEN_LISTS = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[\s*(?:\[|\]|-?\d|$)")
"""How a JSON list of lists of tokens begins; every other file is read by ms-data."""
LIMIT_BYTES = 2**32
Token = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Rows = dict[str, Tensor]
"""`tokens` and `targets`, (R, S) int64, and of conversations `weights`, (R, S) float32."""


def rows(
    folder: str | Path, *, split: str, sequence_length: int, count: int, seed: int = 0
) -> Rows:
    """Read the first `count` rows of a split in the order of a seed, fewer if there are no more.

    Raises:
        DataError: the folder holds no shards, not this split, or too little of it.
    """
    if _holds_conversations(folder, split):
        return _conversations(Path(folder), split, sequence_length, count, seed, folder)
    stream = _text_stream(folder, split, sequence_length, 1, seed)
    taken = [next(stream) for _ in range(min(count, stream.samples_per_epoch))]
    return {
        name: torch.cat([torch.as_tensor(each[name]).long() for each in taken])
        for name in ("tokens", "targets")
    }


def held_out(
    dataset: str | Path, *, sequence_length: int, count: int, chat: str | Path | None = None
) -> Rows:
    """Read rows to measure on: the split `held_out`, or all of a file of conversations.

    Raises:
        DataError: it is no dataset, or has no such split.
    """
    if not Path(dataset).is_file():
        return rows(dataset, split="held_out", sequence_length=sequence_length, count=count)
    if not _is_instruction_set(Path(dataset)):
        raise DataError(
            f"{dataset}: give a folder of shards with a split held_out, or a file of conversations"
        )
    with _rendered(Path(dataset), chat) as folder:
        return _conversations(folder, "train", sequence_length, count, 0, dataset)


def read_batch(
    dataset: str | Path, *, count: int, length: int, chat: str | Path | None = None
) -> Rows:
    """Read rows to train on: `tokens`, and `targets`; of conversations, the answers alone.

    Args:
        dataset: a folder of ms-data's shards with a split `train`, a JSON list of lists of
            token numbers, or a file of conversations.
        count: how many rows.
        length: tokens of each, S.
        chat: the folder whose tokenizer and chat template render conversations: the model's.

    Raises:
        DataError: there is too little, or it is no dataset.
    """
    with _conversations_in(dataset, chat) as folder:
        if folder is None:
            tokens = read_tokens(dataset, count=count, length=length + 1)
            return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
        found = _conversations(folder, "train", length, count, 0, dataset)
        _check_rows(Path(dataset), len(found["tokens"]), count, length)
        return found


def read_tokens(
    dataset: str | Path, *, count: int, length: int, chat: str | Path | None = None
) -> Tensor:
    """Read tokens (count, length) int64 to calibrate on; conversations follow one another.

    Args:
        dataset: as of `read_batch`.
        count: how many rows; fewer of conversations, if so many of them fill no more.
        length: tokens of each.
        chat: as of `read_batch`.

    Raises:
        DataError: there is too little, or it is no dataset.
    """
    path = Path(dataset)
    with _conversations_in(path, chat) as folder:
        if folder is not None:
            flat = _joined(folder, count * length)
            # Rows are counted in conversations, most of which are shorter than a row.
            filled = max(1, len(flat) // length)
            if filled < count:
                logger.warning(
                    "%s: its conversations fill %d rows of %d tokens, and rows is %d; these %d are"
                    " used",
                    *(dataset, filled, length, count, filled),
                )
            count = min(count, filled)
        elif path.is_file():
            flat = _from_json(path)
        else:
            stream = _text_stream(path, "train", length, 1, 0)
            _check_rows(path, stream.samples_per_epoch, count, length)
            return rows(path, split="train", sequence_length=length, count=count)["tokens"]
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
        found = read_json(path, list[list[Token]], error=DataError, limit_bytes=LIMIT_BYTES)
    except DataError as error:
        raise DataError(
            f"{error}; give a JSON list of lists of tokens, a file of conversations, or a"
            " folder of shards"
        ) from error
    return torch.tensor([token for row in found for token in row], dtype=torch.int64)


@contextmanager
def _conversations_in(dataset: str | Path, chat: str | Path | None) -> Iterator[Path | None]:
    """Give the shards of a dataset's conversations; None for plain text."""
    path = Path(dataset)
    if not path.is_file():
        yield path if _holds_conversations(path, "train") else None
    elif _is_instruction_set(path):
        with _rendered(path, chat) as folder:
            yield folder
    else:
        yield None


def _is_instruction_set(path: Path) -> bool:
    """Return whether a file is an instruction set, by how it begins and not by its name."""
    try:
        with path.open("rb") as file:
            return TOKEN_LISTS.match(file.read(4096)) is None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


@contextmanager
def _rendered(path: Path, chat: str | Path | None) -> Iterator[Path]:
    """Render a file of conversations as shards, in a temporary folder."""
    ms_data = _ms_data()
    tokenizer = None if chat is None else Path(chat) / "tokenizer.json"
    if tokenizer is None or not tokenizer.is_file():
        raise DataError(
            f"{path}: conversations are rendered by the tokenizer and the chat template of the"
            f" model's folder, and {chat or 'no folder'} has no tokenizer.json; give a model that"
            " was trained on conversations"
        )
    with TemporaryDirectory() as place:
        folder = Path(place) / "shards"
        ms_data.build(path, tokenizer=tokenizer, out=folder, chat=chat)
        yield folder


def _holds_conversations(folder: str | Path, split: str) -> bool:
    """Return whether shards are of conversations; refuse those of neither these nor text."""
    if not (Path(folder) / "index.json").is_file():
        return False
    ms_data = _ms_data()
    if split not in ms_data.inspect(folder).splits:
        return False
    try:
        kind = ms_data.Samples(folder, split).kind
    except ms_data.SettingError:  # plain text
        return False
    if kind != "conversations":
        raise DataError(f"{folder} holds {kind}; give text or conversations")
    return True


def _conversations(
    folder: Path, split: str, length: int, count: int, seed: int, dataset: str | Path
) -> Rows:
    """Read one conversation a row, cut off at the row's end, in the order of a seed."""
    stream = _ms_data().InstructionStream(
        folder,
        sequence_length=length,
        batch_size=1,
        split=split,
        seed=seed,
        open_rows=0,
        epochs=1,
    )
    # Where a prompt alone is longer than a row, nothing of the row is to be learnt.
    learnt = (row for row in stream if (row["weights"] > 0).any())
    taken: list[Mapping[str, Any]] = list(islice(learnt, count))
    if not taken:
        raise DataError(
            f"{dataset}: no answer begins within {length} tokens; give longer sequences"
        )
    (counts,) = stream.counts.values()
    if counts["truncated"]:
        logger.warning(
            "%s: of %d conversations, %d were cut off at sequence_length (%d tokens), and %d of"
            " these were dropped, as no answer begins before; raise sequence_length to use them"
            " whole",
            *(dataset, counts["drawn"], counts["truncated"], length, counts["without_targets"]),
        )
    return {
        name: torch.cat([torch.as_tensor(row[name]) for row in taken])
        for name in ("tokens", "targets", "weights")
    }


def _joined(folder: Path, most: int) -> Tensor:
    """Join the tokens of conversations, at least `most` of them if there are so many."""
    samples = _ms_data().Samples(folder, "train")
    parts, held = [], 0
    for number in range(len(samples)):
        if held >= most:
            break
        parts.append(torch.as_tensor(samples.conversation(number).tokens).long())
        held += len(parts[-1])
    return torch.cat(parts)


def _text_stream(folder: str | Path, split: str, length: int, batch_size: int, seed: int) -> Any:
    ms_data = _ms_data()
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


def _ms_data() -> Any:
    purpose = "reading shards or conversations needs ms-data"
    return import_library("ms_data", extra="data", purpose=purpose, error=ConfigError)
