"""Rows of text for calibration, training and evaluation: plain text or conversations.

A dataset is a folder of ms-data shards (text or conversations), a JSON list of token lists, a text
file or a folder of these, or a file of conversations, rendered with the model folder's chat
template. A row has the start of one conversation, and only its answers count in the loss. All
runtimes read such rows in the same way, as they need no boundaries between conversations in a row.
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
"""Start of a JSON list of token lists; all other files are read by ms-data."""
TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".tex", ".html", ".py")
"""Suffixes of text files; other files have token lists or conversations."""
LIMIT_BYTES = 2**32
Token = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Rows = dict[str, Tensor]
"""`tokens` and `targets`, (R, S) int64; for conversations also `weights`, (R, S) float32."""


def rows(
    folder: str | Path, *, split: str, sequence_length: int, count: int, seed: int = 0
) -> Rows:
    """Read the first `count` rows of a split in seeded order, or fewer if it has fewer.

    Raises:
        DataError: the folder has no shards, not this split, or too little data.
    """
    if _holds_conversations(folder, split):
        return _conversations(Path(folder), split, sequence_length, count, seed, folder)
    stream = _text_stream(folder, split, sequence_length, 1, seed)
    batches = [next(stream) for _ in range(min(count, stream.samples_per_epoch))]
    return {
        name: torch.cat([torch.as_tensor(batch[name]).long() for batch in batches])
        for name in ("tokens", "targets")
    }


def held_out(
    dataset: str | Path, *, sequence_length: int, count: int, chat: str | Path | None = None
) -> Rows:
    """Read evaluation rows: the split `held_out`, or all of a file of conversations.

    Raises:
        DataError: it is not a dataset, or has no such split.
    """
    if not Path(dataset).is_file():
        return rows(dataset, split="held_out", sequence_length=sequence_length, count=count)
    if _has_token_lists(Path(dataset)):
        raise DataError(
            f"{dataset} must be a folder of shards with a split held_out, a text file, or a file of"
            " conversations; build the shards with --held-out-fraction"
        )
    with _built(Path(dataset), chat) as folder:
        if not _holds_conversations(folder, "train"):
            return rows(folder, split="train", sequence_length=sequence_length, count=count)
        return _conversations(folder, "train", sequence_length, count, 0, dataset)


def read_batch(
    dataset: str | Path, *, count: int, length: int, chat: str | Path | None = None
) -> Rows:
    """Read rows to train on: `tokens` and `targets`; for conversations, only answers count.

    Args:
        dataset: folder of ms-data shards with a split `train`, JSON list of token lists, text file,
            or file of conversations.
        count: number of rows.
        length: tokens per row, S.
        chat: folder with the tokenizer and chat template for text and conversations: the model's.

    Raises:
        DataError: there is too little data, or it is not a dataset.
    """
    with _shards(dataset, chat) as folder:
        if folder is None or not _holds_conversations(folder, "train"):
            # One more token, as the targets are shifted by one.
            tokens = _tokens(Path(dataset), folder, "train", count, length + 1)
            return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
        rows_by_name = _conversations(folder, "train", length, count, 0, dataset)
        _check_rows(Path(dataset), len(rows_by_name["tokens"]), count, length)
        return rows_by_name


def read_tokens(
    dataset: str | Path,
    *,
    count: int,
    length: int,
    chat: str | Path | None = None,
    split: str = "train",
    fewer: bool = False,
) -> Tensor:
    """Read tokens (count, length) int64 for calibration; conversations are concatenated.

    Args:
        dataset: as in `read_batch`.
        count: number of rows; fewer if the conversations do not fill them.
        length: tokens per row.
        chat: as in `read_batch`.
        split: split of shards; a file has only the split `train`.
        fewer: return fewer rows if the dataset is smaller.

    Raises:
        DataError: there is too little data, or it is not a dataset.
    """
    with _shards(dataset, chat) as folder:
        return _tokens(Path(dataset), folder, split, count, length, fewer=fewer)


def _tokens(
    path: Path, folder: Path | None, split: str, count: int, length: int, *, fewer: bool = False
) -> Tensor:
    """Read rows (count, length) of a folder of shards, or of a JSON list of token lists."""
    if folder is None:
        flat = _from_json(path)
    elif _holds_conversations(folder, split):
        flat = _joined(folder, split, count * length)
        # `count` is in conversations, and most conversations are shorter than a row.
        filled = max(1, len(flat) // length)
        if filled < count and not fewer:
            logger.warning(
                "%s: the conversations fill %d rows of %d tokens, fewer than rows=%d; using %d",
                *(path, filled, length, count, filled),
            )
        count = min(count, filled)
    else:
        available = _text_stream(folder, split, length, 1, 0).samples_per_epoch
        if fewer:
            count = min(count, max(1, available))
        _check_rows(path, available, count, length)
        return rows(folder, split=split, sequence_length=length, count=count)["tokens"]
    if fewer:
        count = min(count, max(1, len(flat) // length))
    _check_rows(path, len(flat) // length, count, length)
    return flat[: count * length].view(count, length)


def _check_rows(path: Path, available: int, count: int, length: int) -> None:
    if available < count:
        raise DataError(
            f"{path} must have at least {count} rows of {length} tokens, got {available};"
            " lower rows or sequence_length"
        )


def _from_json(path: Path) -> Tensor:
    try:
        token_lists = read_json(path, list[list[Token]], error=DataError, limit_bytes=LIMIT_BYTES)
    except DataError as error:
        raise DataError(
            f"{error}; use a JSON list of token lists, a file of conversations, or a folder of"
            " shards"
        ) from error
    return torch.tensor([token for row in token_lists for token in row], dtype=torch.int64)


@contextmanager
def _shards(dataset: str | Path, chat: str | Path | None) -> Iterator[Path | None]:
    """Yield the folder of shards with a dataset's text; None for a JSON list of token lists."""
    path = Path(dataset)
    if path.is_dir() and not (path / "index.json").is_file() and _has_texts(path):
        with _built(path, chat) as folder:
            yield folder
    elif not path.is_file():
        yield path
    elif _has_token_lists(path):
        yield None
    else:
        with _built(path, chat) as folder:
            yield folder


def _has_texts(path: Path) -> bool:
    """Return whether a path is a text file, or a folder with some."""
    files = [path] if path.is_file() else path.iterdir()
    return any(file.suffix.lower() in TEXT_SUFFIXES for file in files)


def _has_token_lists(path: Path) -> bool:
    """Return True if the start of a file looks like a JSON list of token lists."""
    try:
        with path.open("rb") as file:
            return TOKEN_LISTS.match(file.read(4096)) is not None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


@contextmanager
def _built(path: Path, chat: str | Path | None) -> Iterator[Path]:
    """Convert text files or a file of conversations to shards in a temporary folder."""
    ms_data = _ms_data()
    tokenizer = None if chat is None else Path(chat) / "tokenizer.json"
    if tokenizer is None or not tokenizer.is_file():
        raise DataError(
            f"{path}: conversations need the tokenizer and chat template of the model's folder, and"
            f" text its tokenizer, but {chat or 'no folder'} has no tokenizer.json; use a model"
            " folder with one"
        )
    with TemporaryDirectory() as temp_dir:
        folder = Path(temp_dir) / "shards"
        template = None if _has_texts(path) else chat
        ms_data.build(path, tokenizer=tokenizer, out=folder, chat=template)
        yield folder


def _holds_conversations(folder: str | Path, split: str) -> bool:
    """Return whether shards have conversations; raise if they have neither these nor text."""
    if not (Path(folder) / "index.json").is_file():
        return False
    ms_data = _ms_data()
    if split not in ms_data.inspect(folder).splits:
        return False
    try:
        sample_type = ms_data.Samples(folder, split).kind
    except ms_data.SettingError:  # plain text
        return False
    if sample_type != "conversations":
        raise DataError(f"{folder} must have text or conversations, got {sample_type}; rebuild it")
    return True


def _conversations(
    folder: Path, split: str, length: int, count: int, seed: int, dataset: str | Path
) -> Rows:
    """Read one conversation per row, truncated to the row, in seeded order."""
    stream = _ms_data().InstructionStream(
        folder,
        sequence_length=length,
        batch_size=1,
        split=split,
        seed=seed,
        open_rows=0,  # no packing: one conversation per row
        epochs=1,
    )
    # Skip rows without an answer: a prompt longer than the row has nothing to learn.
    with_answers = (row for row in stream if (row["weights"] > 0).any())
    selected: list[Mapping[str, Any]] = list(islice(with_answers, count))
    if not selected:
        raise DataError(
            f"{dataset}: no answer starts within {length} tokens; increase sequence_length"
        )
    (counts,) = stream.counts.values()
    if counts["truncated"]:
        logger.warning(
            "%s: of %d conversations, %d were truncated at sequence_length (%d tokens), and %d of"
            " these were dropped because no answer starts before; raise sequence_length to use them"
            " completely",
            *(dataset, counts["drawn"], counts["truncated"], length, counts["without_targets"]),
        )
    return {
        name: torch.cat([torch.as_tensor(row[name]) for row in selected])
        for name in ("tokens", "targets", "weights")
    }


def _joined(folder: Path, split: str, limit: int) -> Tensor:
    """Concatenate the tokens of conversations until there are at least `limit`, if possible."""
    samples = _ms_data().Samples(folder, split)
    parts, total = [], 0
    for number in range(len(samples)):
        if total >= limit:
            break
        parts.append(torch.as_tensor(samples.conversation(number).tokens).long())
        total += len(parts[-1])
    return torch.cat(parts)


def _text_stream(folder: str | Path, split: str, length: int, batch_size: int, seed: int) -> Any:
    ms_data = _ms_data()
    if not (Path(folder) / "index.json").is_file():
        raise DataError(f"{folder} has no shards; build them with ms-data build")
    splits = ms_data.inspect(folder).splits
    if split not in splits:
        raise DataError(
            f"{folder} has no split {split!r}, only {', '.join(sorted(splits))}; build it with"
            " --held-out-fraction"
        )
    return ms_data.TokenStream(
        folder, sequence_length=length, batch_size=batch_size, split=split, seed=seed
    )


def _ms_data() -> Any:
    purpose = "reading shards or conversations needs ms-data"
    return import_library("ms_data", extra="data", purpose=purpose, error=ConfigError)
