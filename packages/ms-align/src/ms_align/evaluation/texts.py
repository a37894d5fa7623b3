"""Tokenization as in lm-evaluation-harness's `hf` model."""

from collections.abc import Sequence
from typing import Any

from ms_align.errors import ConfigError
from ms_align.tokenizer import HuggingFaceTokenizer, Tokenizer


class TextCodec:
    """Converts between text and tokens for evaluation tasks.

    A transformers tokenizer adds its special tokens if that is its default, but no second
    beginning-of-text token before a text that already starts with one.

    Args:
        tokenizer: tokenizer of the model.
        ends: end-of-text tokens, the most common first.

    Raises:
        ConfigError: the tokenizer has no end-of-text token and `ends` is empty.
    """

    def __init__(self, tokenizer: Tokenizer, ends: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.inner: Any = (
            tokenizer.tokenizer if isinstance(tokenizer, HuggingFaceTokenizer) else None
        )
        end = getattr(tokenizer, "end_of_text", None)
        # A dict keeps the order and drops duplicates.
        all_ends = dict.fromkeys([*([] if end is None else [int(end)]), *ends])
        if not all_ends:
            raise ConfigError("the tokenizer has no end-of-text token; set its eos_token")
        self.ends = tuple(all_ends)
        begin = getattr(self.inner, "bos_token_id", None)
        self.prefix = self.ends[0] if begin is None else int(begin)
        """Token that precedes a text without context."""

    def encode(self, text: str, special: bool | None = None) -> list[int]:
        """Encode a text.

        Args:
            text: text to encode.
            special: add special tokens; None: the tokenizer's default.
        """
        if self.inner is None:
            return self.tokenizer.encode(text)
        # A rendered chat may start with the token already.
        if special is None and text.startswith(self.inner.decode([self.prefix])):
            special = False
        options = {} if special is None else {"add_special_tokens": special}
        return list(self.inner.encode(text, **options))

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode token ids to text, skipping special tokens."""
        return self.tokenizer.decode(tokens)

    @property
    def end_text(self) -> str:
        """Text of the end-of-text token; empty for other than transformers tokenizers."""
        return "" if self.inner is None else str(self.inner.decode([self.ends[0]]))
