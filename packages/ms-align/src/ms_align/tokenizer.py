"""Tokenizer protocol, the byte tokenizer, and loading from disk."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from ms_align.chat.template import render_chat
from ms_align.errors import ConfigError, DataError
from ms_align.files.untrusted import check_path, decoding


class Tokenizer(Protocol):
    """Conversion of text to token ids and back."""

    def encode(self, text: str) -> list[int]:
        """Encode a text without adding special tokens."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode token ids to text, skipping special tokens."""


class ByteTokenizer:
    """One token per UTF-8 byte, plus token 256 as end of text. For small experiments."""

    vocabulary_size = 257
    end_of_text = 256

    def encode(self, text: str) -> list[int]:
        """Return the bytes of the UTF-8 encoding."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode bytes to text; invalid UTF-8 becomes the replacement character."""
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


class HuggingFaceTokenizer:
    """Adapter for a transformers tokenizer; renders chats with its template, under limits.

    Args:
        tokenizer: result of `transformers.AutoTokenizer.from_pretrained`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.vocabulary_size = len(tokenizer)
        self.end_of_text: int | None = tokenizer.eos_token_id
        self.tools: Sequence[dict[str, Any]] | None = None
        """JSON schemas of the tools that chats offer to the model."""

    def encode(self, text: str) -> list[int]:
        """Encode a text without adding special tokens."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode token ids to text, skipping special tokens."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def encode_messages(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Encode a chat, ending where the assistant's reply starts."""
        return self.encode(render_chat(self.tokenizer, messages, tools=self.tools))


def load_tokenizer(name: str | Path) -> Tokenizer:
    """Load a tokenizer: `bytes`, a `tokenizer.json`, or a Hugging Face folder.

    Raises:
        ConfigError: the package that reads it is not installed.
        DataError: the file or folder does not exist or cannot be read.
    """
    if str(name) == "bytes":
        return ByteTokenizer()
    check_path("a tokenizer", name, error=DataError)
    with decoding(name, error=DataError):
        return _load(Path(name))


def _load(path: Path) -> Tokenizer:
    if path.is_dir() and (path / "tokenizer_config.json").is_file():
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ConfigError(
                f"reading the tokenizer of {path} needs transformers; install ms-align[hf]"
            ) from error
        try:
            return HuggingFaceTokenizer(AutoTokenizer.from_pretrained(path))
        except Exception as error:  # transformers raises many types for damaged files
            raise DataError(f"{path} cannot be read: {error}; check that it is complete") from error
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"no tokenizer at {path}; use 'bytes', a file or a folder")
    try:
        from ms_data import Tokenizer as DataTokenizer
    except ImportError as error:
        raise ConfigError(f"reading {file} needs ms-data; install ms-align[data]") from error
    loaded: Tokenizer = DataTokenizer.load(file)
    return loaded
