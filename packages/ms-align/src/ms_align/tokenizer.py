"""Texts to tokens and back: the Protocol, plain bytes, and tokenizers from disk."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from ms_align.chat.template import render_chat
from ms_align.errors import ConfigError, DataError
from ms_align.files.untrusted import check_path, decoding


class Tokenizer(Protocol):
    """What is asked of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Encode a text, without special tokens around it."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens to text, special ones left out."""


class ByteTokenizer:
    """A token a byte of UTF-8; token 256 ends a text. For small experiments."""

    vocabulary_size = 257
    end_of_text = 256

    def encode(self, text: str) -> list[int]:
        """Return the text's bytes."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode bytes to text; what is no UTF-8 becomes a replacement character."""
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


class HuggingFaceTokenizer:
    """A tokenizer of transformers; its chat template, under limits, serves prompts that are chats.

    Args:
        tokenizer: as `transformers.AutoTokenizer.from_pretrained` gives it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.vocabulary_size = len(tokenizer)
        self.end_of_text: int | None = tokenizer.eos_token_id

    def encode(self, text: str) -> list[int]:
        """Encode a text, without special tokens around it."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens to text, special ones left out."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def encode_messages(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Encode a chat up to where the assistant is to go on."""
        return self.encode(render_chat(self.tokenizer, messages))


def load_tokenizer(name: str | Path) -> Tokenizer:
    """Load the tokenizer `bytes`, a `tokenizer.json`, or that of a Hugging Face folder.

    Raises:
        ConfigError: the extra that reads it is not installed.
        DataError: there is no such file or folder.
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
        except Exception as error:  # each kind of damage has an error of its own
            raise DataError(f"{path} cannot be read: {error}; is it whole?") from error
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"there is no tokenizer at {path}; give 'bytes', a file or a folder")
    try:
        from ms_data import Tokenizer as DataTokenizer
    except ImportError as error:
        raise ConfigError(f"reading {file} needs ms-data; install ms-align[data]") from error
    loaded: Tokenizer = DataTokenizer.load(file)
    return loaded
