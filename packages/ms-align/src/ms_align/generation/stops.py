"""Stop conditions: stop tokens and stop strings.

Without explicit stop tokens, responses end with the model's end-of-text tokens.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve

from ms_align.errors import ConfigError
from ms_align.generation.sampling import Sampling
from ms_align.models.folder import folder_of
from ms_align.tokenizer import Tokenizer
from ms_align.tokenizer_files import TokenizerFiles, has_tokenizer

logger = logging.getLogger(__name__)
Decode = Callable[[Sequence[int]], str]


def max_stop_tokens(strings: Sequence[str]) -> int:
    """Return how many of the last tokens must be decoded to find any of the stop strings."""
    # A token has at least one byte, and the first and last may be parts of a character.
    return max(len(text.encode()) for text in strings) + 4


def contains_stop_string(tail: Sequence[int], strings: Sequence[str], decode: Decode) -> bool:
    """Return True if the last `max_stop_tokens` tokens of a response contain a stop string."""
    text = decode(tail)
    return any(string in text for string in strings)


def first_stop(tokens: Sequence[int], sampling: Sampling, decode: Decode | None) -> int | None:
    """Return a response's length up to and including its first stop; None without a stop."""
    strings = sampling.stop_strings if decode is not None else ()
    lookback = max_stop_tokens(strings) if strings else 0
    for length, token in enumerate(tokens, 1):
        if token in sampling.stop_token_ids:
            return length
        tail = tokens[max(0, length - lookback) : length]
        if strings and decode is not None and contains_stop_string(tail, strings, decode):
            return length
    return None


def resolve_tokenizer(tokenizer: Any, model: Any) -> Any:
    """Return the tokenizer setting; by default, the model's folder if it has a tokenizer."""
    if tokenizer is not None:
        return tokenizer
    if isinstance(model, str | Path) and has_tokenizer(Path(model)):
        return Path(model)  # an adapter's folder may have its own tokenizer
    folder = folder_of(model)
    return folder if folder is not None and has_tokenizer(folder) else None


def with_stops(
    sampling: Sampling,
    stop_token_ids: tuple[int, ...] | None,
    tokenizer: Tokenizer | None,
    files: TokenizerFiles | None,
) -> Sampling:
    """Complete the stop conditions of sampling settings.

    Args:
        sampling: settings; stop strings that are special tokens become stop tokens.
        stop_token_ids: None for the end-of-text tokens of the tokenizer's files.
        tokenizer: decodes tokens for stop strings.
        files: files of the tokenizer.

    Raises:
        ConfigError: a stop string can never occur.
    """
    ends = stop_token_ids
    if ends is None:
        end = getattr(tokenizer, "end_of_text", None)
        ends = files.ends if files and files.ends else () if end is None else (int(end),)
        if not ends:
            logger.warning(
                "warning: neither the model's folder nor the tokenizer names an end-of-text token, "
                "so responses run to max_new_tokens unless a stop string ends them; set "
                "stop_token_ids"
            )
    # Special tokens are not in decoded text, so they must be matched by id.
    special = files.ids if files else {}
    strings = [text for text in sampling.stop_strings if text not in special]
    if strings and tokenizer is None:
        raise ConfigError(
            f"stop_strings {strings!r} need a tokenizer to decode tokens; set tokenizer, or use "
            "stop_token_ids"
        )
    for text in strings:
        inside = next((name for name in special if name in text), None)
        if inside is not None:
            raise ConfigError(
                f"stop_strings has {text!r}, but decoded text never contains the special token "
                f"{inside!r}; use {inside!r} alone, or the text without it"
            )
    special_ids = [special[text] for text in sampling.stop_strings if text in special]
    return evolve(
        sampling,
        stop_token_ids=tuple(dict.fromkeys([*ends, *special_ids])),
        stop_strings=tuple(strings),
    )
