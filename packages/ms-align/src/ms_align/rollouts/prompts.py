"""Prompt datasets: reading, validation and a reproducible order."""

import codecs
import gzip
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from attrs import field, frozen

from ms_align.arguments import shown
from ms_align.errors import ConfigError, DataError
from ms_align.files.untrusted import check_path, decode_json, decoding, read_bytes
from ms_align.seeds import seed_of
from ms_align.tokenizer import Tokenizer

MAX_FILE_BYTES = 1 << 36
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
MAX_TOKENS = 2**31
"""Upper bound for token ids; tokenizers cannot handle larger ones."""


@frozen(kw_only=True)
class Prompt:
    """One prompt with the columns that reward functions may use."""

    tokens: tuple[int, ...]
    text: str
    """Original text, or the decoded tokens."""
    answer: str | None = None
    """Reference answer."""
    extra: Mapping[str, Any] = field(factory=dict)
    """All other columns."""
    messages: Sequence[Mapping[str, Any]] | None = None
    """The prompt as chat messages. None: a text or token ids."""


def read_prompts(
    dataset: str | Path | Iterable[Any],
    tokenizer: Tokenizer | None,
    responses: str | Path | Iterable[Any] | None = None,
    *,
    name: str = "prompt_dataset",
    chat: bool = False,
) -> list[Prompt]:
    """Read the prompts of a dataset.

    Args:
        dataset: strings, lists of token ids, lists of chat messages, or mappings with one of these
            under the key `prompt`; or the path of a file with such entries: JSON Lines, a JSON
            array, CSV, TSV, Parquet or Arrow, plain or compressed by gzip or zstd. All formats
            except plain and gzip-compressed JSON need ms-data.
        tokenizer: required for strings and messages.
        responses: reference answers in the order of the prompts. None: the key `answer` of each
            mapping, if present.
        name: name of the dataset, for messages.
        chat: treat every prompt as a chat; a text becomes a user message.

    Raises:
        DataError: the dataset is empty, an entry is invalid, or the number of answers differs.
    """
    entries = _entries(dataset, name)
    if not entries:
        raise DataError(f"{name} is empty; add at least one prompt")
    answers: list[Any] | None = None
    if responses is not None:
        answers = _entries(responses, "response_dataset", prompts=False)
        if len(answers) != len(entries):
            raise DataError(
                f"response_dataset has {len(answers)} entries and {name} has {len(entries)}; "
                "provide one answer per prompt, in the same order"
            )
    prompts = []
    for index, entry in enumerate(entries):
        answer = answers[index] if answers else None
        if isinstance(answer, Mapping):
            column = next((key for key in ("answer", "response") if key in answer), None)
            if column is None:
                raise DataError(
                    f"response_dataset entry {index} must have 'answer' or 'response', got "
                    f"{', '.join(map(repr, answer)) or 'no columns'}; rename the column"
                )
            answer = answer[column]
        prompts.append(_prompt(entry, answer, tokenizer, f"{name} entry {index}", chat))
    return prompts


def _entries(dataset: str | Path | Iterable[Any], name: str, *, prompts: bool = True) -> list[Any]:
    if not isinstance(dataset, str | Path):
        if not isinstance(dataset, Iterable):
            raise DataError(
                f"{name} must be a file or a list of prompts, got {shown(dataset)}; pass one"
            )
        return list(dataset)
    check_path(name, dataset, error=DataError)
    path = Path(dataset)
    content = _unpacked(read_bytes(path, error=DataError, limit_bytes=MAX_FILE_BYTES), path)
    content = content.removeprefix(codecs.BOM_UTF8)
    if not content.strip():
        return []
    if not _begins_as_json(content.lstrip()):
        return _table_rows(path)
    lines = [(number, line) for number, line in enumerate(content.splitlines(), 1) if line.strip()]
    # A line of JSON Lines may itself be an array: a chat or the token ids of a prompt.
    if content.lstrip().startswith(b"[") and not _is_json(lines[0][1]):
        rows: list[Any] = decode_json(content, list, where=path, error=DataError)
        return rows
    entries: list[Any] = [
        decode_json(line, Any, where=f"{path} line {number}", error=DataError)
        for number, line in lines
    ]
    # A single line may be the list of all prompts, or one prompt that is a list.
    only: Any = entries[0] if len(entries) == 1 else None
    return only if isinstance(only, list) and not (prompts and _is_prompt(only)) else entries


def _unpacked(content: bytes, path: Path) -> bytes:
    """Decompress the content of a gzip or zstd file; other content is returned unchanged."""
    if content.startswith(GZIP):
        try:
            return gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path}: damaged gzip file ({error}); fetch it again") from error
    if content.startswith(ZSTD):
        try:
            import zstandard
        except ImportError as error:
            raise ConfigError(f"reading {path} needs zstandard; install ms-align[data]") from error
        parts: list[bytes] = []
        try:
            while content:
                # A file may have several frames, for example after concatenation.
                frame = zstandard.ZstdDecompressor().decompressobj()
                parts.append(frame.decompress(content))
                if not frame.eof:
                    raise DataError(f"{path}: the zstd file is cut off; fetch it again")
                content = frame.unused_data
        except zstandard.ZstdError as error:
            raise DataError(f"{path}: damaged zstd file ({error}); fetch it again") from error
        return b"".join(parts)
    return content


def _begins_as_json(content: bytes) -> bool:
    """Return True if content starts like JSON entries; a CSV file may start with a quoted name."""
    if content.startswith(b'"'):
        return _is_json(content.partition(b"\n")[0])
    return content.startswith((b"[", b"{"))


def _table_rows(path: Path) -> list[Any]:
    """Read a table of another kind than JSON with ms-data."""
    try:
        from ms_data import DataError as DatasetError
        from ms_data import read_rows
    except ImportError as error:
        raise ConfigError(
            f"{path} is not JSON; reading tables of other kinds needs ms-data; install "
            "ms-align[data]"
        ) from error
    try:
        return list(read_rows(path))
    except DatasetError as error:
        raise DataError(str(error)) from error


def _is_json(line: bytes) -> bool:
    try:
        msgspec.json.decode(line, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _is_prompt(items: Sequence[Any]) -> bool:
    """Return True if an array is one prompt (token ids or a chat) and not a list of prompts."""
    return bool(items) and all(
        isinstance(item, int) or (isinstance(item, Mapping) and "role" in item) for item in items
    )


def _prompt(entry: Any, answer: Any, tokenizer: Tokenizer | None, where: str, chat: bool) -> Prompt:
    extra: dict[str, Any] = {}
    if isinstance(entry, Mapping):
        extra = {key: value for key, value in entry.items() if key not in ("prompt", "answer")}
        answer = entry.get("answer") if answer is None else answer
        if "prompt" not in entry:
            raise DataError(f"{where} has keys {sorted(entry)} and no 'prompt'; add it")
        entry = entry["prompt"]
    if chat and isinstance(entry, str):
        entry = [{"role": "user", "content": entry}]
    is_chat = isinstance(entry, list | tuple) and bool(entry) and isinstance(entry[0], Mapping)
    if chat and not is_chat:
        raise DataError(
            f"{where} must be a text or a list of messages, as tools and environments need a chat, "
            f"got {str(entry)[:40]!r}; correct it"
        )
    tokens, text = _tokens(entry, tokenizer, where)
    return Prompt(
        tokens=tuple(tokens),
        text=text,
        answer=None if answer is None else str(answer),
        extra=extra,
        messages=tuple(entry) if is_chat else None,
    )


def _tokens(entry: Any, tokenizer: Tokenizer | None, where: str) -> tuple[list[int], str]:
    if isinstance(entry, Sequence) and not isinstance(entry, str) and len(entry):
        if all(isinstance(token, int) and not isinstance(token, bool) for token in entry):
            for token in entry:
                if not 0 <= token < MAX_TOKENS:
                    raise DataError(
                        f"{where} has the token id {token}; use ids of the tokenizer's vocabulary, "
                        "which are not negative"
                    )
            return list(entry), tokenizer.decode(list(entry)) if tokenizer else ""
        template = getattr(tokenizer, "encode_messages", None)
        if all(isinstance(message, Mapping) for message in entry):
            _check_messages(entry, where)
            if template is None:
                raise DataError(
                    f"{where} is a chat and the tokenizer has no chat template; use a Hugging Face "
                    "tokenizer with one"
                )
            with decoding(where, error=DataError):
                return template(entry), str(entry[-1].get("content", ""))
    if not isinstance(entry, str):
        raise DataError(
            f"{where} must be a string, a list of token ids or a list of messages, got "
            f"{str(entry)[:40]!r}; correct it"
        )
    if tokenizer is None:
        raise DataError(f"{where} is a string, which needs a tokenizer; set tokenizer")
    with decoding(where, error=DataError):
        tokens = tokenizer.encode(entry)
    if not tokens:
        raise DataError(f"{where} has no tokens; every prompt needs at least one, correct it")
    return tokens, entry


def _check_messages(messages: Sequence[Mapping[str, Any]], where: str) -> None:
    """Reject messages that a chat template would drop or render as a Python repr.

    Raises:
        DataError: one has no `role`, or neither a text as `content` nor tool calls.
    """
    for number, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise DataError(
                f"{where}: message {number} must have `role` and `content`, got keys "
                f"{sorted(map(str, message))}; rename them"
            )
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise DataError(
                f"{where}: the content of message {number} must be a string, got "
                f"{type(content).__name__}; correct it"
            )


@frozen(kw_only=True)
class PromptOrder:
    """Order of the prompts: a new random permutation in each epoch."""

    count: int
    """Number of prompts."""
    seed: int

    def take(self, position: int, count: int) -> list[int]:
        """Return the indices of `count` prompts from `position`, which counts across epochs."""
        indices: list[int] = []
        while len(indices) < count:
            # A request may span the end of an epoch.
            epoch, start = divmod(position + len(indices), self.count)
            # The order depends only on seed and epoch, so a run can resume at any position.
            generator = torch.Generator().manual_seed(seed_of(self.seed, epoch, stride=1_000_003))
            order = torch.randperm(self.count, generator=generator).tolist()
            indices += order[start : start + count - len(indices)]
        return indices


def prompts_checksum(prompts: Sequence[Prompt]) -> str:
    """Return a checksum of the tokens of all prompts."""
    checksum = 0
    for prompt in prompts:
        checksum = zlib.crc32(repr(prompt.tokens).encode(), checksum)
    return f"{checksum:08x}"
