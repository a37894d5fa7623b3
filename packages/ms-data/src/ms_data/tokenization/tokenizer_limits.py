"""Checks a tokenizer.json for sizes that would exhaust memory, before the library loads it.

Tokenizers are untrusted files. The library allocates memory by the largest ID, not the number of
tokens, and applies any replacements that a normalizer lists.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from ms_data.errors import TokenizerError

MAX_TOKENS = 1 << 21
"""Eight times the largest common vocabulary; the library uses 0.7 kB per token."""
LIMIT_BYTES = 128 << 20
"""Four times the largest common tokenizer.json."""
GROWTH = 16
"""Maximum growth of a text by normalization, far above any common normalizer."""

_ID_SLACK = 1 << 16  # some vocabularies leave gaps for special tokens
_CHAIN_GROWTH = 1 << 12  # from here, even a short text is dangerous
_PIECE_CHARACTERS = 256


class AddedToken(msgspec.Struct, frozen=True):
    """A token added to the vocabulary of the model."""

    id: int
    content: str
    special: bool = False


class _Model(msgspec.Struct, frozen=True):
    vocab: dict[str, int] | list[tuple[str, float]]
    """Unigram models list tokens with scores."""


class TokenizerFile(msgspec.Struct, frozen=True):
    """The checked parts of a tokenizer.json."""

    model: _Model
    added_tokens: list[AddedToken] | None = None
    normalizer: Any = None

    @property
    def added(self) -> dict[str, bool]:
        """Added tokens; the values tell whether a token is special."""
        return {token.content: token.special for token in self.added_tokens or []}


def check_file(content: bytes) -> TokenizerFile:
    """Decode the parts of a tokenizer.json that determine its memory, and check their sizes.

    Raises:
        TokenizerError: the vocabulary, an ID or the growth of a text exceeds that of any real
            tokenizer.
        msgspec.MsgspecError: the content is not a tokenizer.json.
    """
    if len(content) > LIMIT_BYTES:
        raise TokenizerError(
            f"has {len(content) >> 20} MiB; a tokenizer.json must not exceed {LIMIT_BYTES >> 20}"
        )
    file = msgspec.json.decode(content, type=TokenizerFile)
    vocab, added = file.model.vocab, file.added_tokens or []
    count = len(vocab) + len(added)
    if count > MAX_TOKENS:
        raise TokenizerError(f"has {count:,} tokens; a tokenizer must not exceed {MAX_TOKENS:,}")
    # In a Unigram list, the position is the id.
    numbers = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    largest = max([max(numbers, default=0), *(token.id for token in added)])
    if largest > 2 * count + _ID_SLACK:
        raise TokenizerError(
            f"numbers its {count:,} tokens up to {largest:,}, and memory depends on the largest "
            "id; renumber them without large gaps"
        )
    if _static_growth(file.normalizer) > _CHAIN_GROWTH:
        raise TokenizerError(
            "has a normalizer whose replacements make a text thousands of times longer; remove "
            "them from the tokenizer.json"
        )
    return file


def may_grow(normalizer: Any) -> bool:
    """Return whether a normalizer can make text much longer, so that texts must be checked."""
    precompiled = any(part.get("type") == "Precompiled" for part in _parts(normalizer))
    return precompiled or _static_growth(normalizer) > GROWTH


def check_growth(normalize: Callable[[str], str], texts: Sequence[str]) -> None:
    """Normalize texts piece by piece, and reject texts that become far longer.

    Raises:
        TokenizerError: a text grows beyond the limit.
    """
    for text in texts:
        size, limit = 0, GROWTH * (len(text) + _PIECE_CHARACTERS)
        for start in range(0, len(text), _PIECE_CHARACTERS):
            size += len(normalize(text[start : start + _PIECE_CHARACTERS]))
            if size > limit:
                raise TokenizerError(
                    f"makes a text more than {GROWTH} times longer before it is encoded; correct "
                    "the normalizer in its tokenizer.json"
                )


def _parts(normalizer: Any) -> Iterator[dict[str, Any]]:
    """Yield the normalizers of a sequence, including nested ones."""
    if not isinstance(normalizer, dict):
        return
    inner = normalizer.get("normalizers")
    if isinstance(inner, list):
        for part in inner:
            yield from _parts(part)
    else:
        yield normalizer


def _static_growth(normalizer: Any) -> float:
    """Return an upper bound for the growth of a text by a normalizer's replacements."""
    growth = 1.0
    for part in _parts(normalizer):
        content, pattern, text = part.get("content"), part.get("pattern"), part.get("prepend")
        if isinstance(content, str) and isinstance(pattern, dict):
            literal = pattern.get("String")
            if isinstance(literal, str) and literal:
                growth *= max(1.0, len(content) / len(literal))  # every occurrence may be replaced
            else:  # a regular expression may match between any two characters
                growth *= 1.0 + len(content)
        if isinstance(text, str):
            growth *= 1.0 + len(text) / _PIECE_CHARACTERS  # prepended once per piece
        growth = min(growth, math.exp2(64))  # a long chain would overflow
    return growth
