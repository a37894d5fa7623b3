"""Texts to tokens and back as lm-evaluation-harness's own `hf` model has them."""

from collections.abc import Sequence
from typing import Any

from ms_align.errors import ConfigError
from ms_align.tokenizer import HuggingFaceTokenizer, Tokenizer


class Texts:
    """A tokenizer as tasks meet it.

    A tokenizer of transformers puts its special tokens around a text where it does so by itself,
    and no second beginning before a text that spells one.

    Args:
        tokenizer: what reads and writes texts.
        ends: tokens that end a text, the most usual one first.

    Raises:
        ConfigError: no token ends a text.
    """

    def __init__(self, tokenizer: Tokenizer, ends: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.inner: Any = (
            tokenizer.tokenizer if isinstance(tokenizer, HuggingFaceTokenizer) else None
        )
        end = getattr(tokenizer, "end_of_text", None)
        known = dict.fromkeys([*([] if end is None else [int(end)]), *ends])
        if not known:
            raise ConfigError("no token ends a text of this tokenizer; set its eos_token")
        self.ends = tuple(known)
        begin = getattr(self.inner, "bos_token_id", None)
        self.prefix = self.ends[0] if begin is None else int(begin)
        """Stands before a text that has nothing before it."""

    def encode(self, text: str, special: bool | None = None) -> list[int]:
        """Encode a text.

        Args:
            text: any.
            special: whether special tokens go around it; None for what the tokenizer does.
        """
        if self.inner is None:
            return self.tokenizer.encode(text)
        if special is None and text.startswith(self.inner.decode([self.prefix])):
            special = False
        options = {} if special is None else {"add_special_tokens": special}
        return list(self.inner.encode(text, **options))

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens to text, special ones left out."""
        return self.tokenizer.decode(tokens)

    @property
    def end_text(self) -> str:
        """The end of a text, spelled out, where the tokenizer can spell it; else empty."""
        return "" if self.inner is None else str(self.inner.decode([self.ends[0]]))
