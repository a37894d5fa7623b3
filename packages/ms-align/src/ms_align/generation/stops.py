"""Where a response ends: with a stop token, or with the token that completes a stop string.

If nobody says where, with the tokens that end a text of the model.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve

from ms_align.errors import ConfigError
from ms_align.generation.sampling import Sampling
from ms_align.models.folder import folder_of
from ms_align.tokenizer import Tokenizer
from ms_align.tokenizer_files import TokenizerFiles, has_tokenizer

Decode = Callable[[Sequence[int]], str]


def reach(strings: Sequence[str]) -> int:
    """Bound the number of last tokens of which the newest can complete one of the stop strings."""
    # A token has at least one byte, but one in mid-character may begin or end the tail.
    return max(len(text.encode()) for text in strings) + 4


def completes(tail: Sequence[int], strings: Sequence[str], decode: Decode) -> bool:
    """Return whether a stop string stands in a response's last `reach` tokens."""
    text = decode(tail)
    return any(each in text for each in strings)


def first_stop(tokens: Sequence[int], sampling: Sampling, decode: Decode | None) -> int | None:
    """Find a response's length up to its first stop, that included; None where there is none."""
    strings = sampling.stop_strings if decode is not None else ()
    back = reach(strings) if strings else 0
    for length, token in enumerate(tokens, 1):
        if token in sampling.stop_tokens:
            return length
        tail = tokens[max(0, length - back) : length]
        if strings and decode is not None and completes(tail, strings, decode):
            return length
    return None


def beside(tokenizer: Any, model: Any) -> Any:
    """Return the tokenizer that is given, or the folder of the model where one lies in it."""
    if tokenizer is not None:
        return tokenizer
    if isinstance(model, str | Path) and has_tokenizer(Path(model)):
        return Path(model)  # an adapter's folder may have one of its own
    folder = folder_of(model)
    return folder if folder is not None and has_tokenizer(folder) else None


def with_stops(
    sampling: Sampling,
    stop_tokens: tuple[int, ...] | None,
    tokenizer: Tokenizer | None,
    files: TokenizerFiles | None,
) -> Sampling:
    """Return how responses are drawn, with all that ends one.

    Args:
        sampling: its stop strings may be special tokens, which no text shows.
        stop_tokens: None for those that end a text by the tokenizer's files.
        tokenizer: what reads stop strings.
        files: the tokenizer's.

    Raises:
        ConfigError: a stop string can never be seen.
    """
    ends = stop_tokens
    if ends is None:
        end = getattr(tokenizer, "end_of_text", None)
        ends = files.ends if files and files.ends else () if end is None else (int(end),)
    special = files.ids if files else {}
    strings = [text for text in sampling.stop_strings if text not in special]
    if strings and tokenizer is None:
        raise ConfigError(
            f"stop_strings are {strings!r} and there is no tokenizer to read tokens with; give "
            "tokenizer=, or stop_tokens"
        )
    for text in strings:
        inside = next((name for name in special if name in text), None)
        if inside is not None:
            raise ConfigError(
                f"stop_strings has {text!r}, and no text ever shows the special token {inside!r}; "
                f"give {inside!r} alone, or the text without it"
            )
    named = [special[text] for text in sampling.stop_strings if text in special]
    return evolve(
        sampling,
        stop_tokens=tuple(dict.fromkeys([*ends, *named])),
        stop_strings=tuple(strings),
    )
