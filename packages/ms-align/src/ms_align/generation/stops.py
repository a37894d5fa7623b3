"""Where a response ends: with a stop token, or with the token that completes a stop string."""

from collections.abc import Callable, Sequence

from ms_align.generation.sampling import Sampling

__all__ = ["Decode", "completes", "first_stop", "reach"]

Decode = Callable[[Sequence[int]], str]


def reach(strings: Sequence[str]) -> int:
    """Most tokens of which the newest can complete one of the stop strings."""
    # A token has at least one byte, but one in mid-character may begin or end the tail.
    return max(len(text.encode()) for text in strings) + 4


def completes(tail: Sequence[int], strings: Sequence[str], decode: Decode) -> bool:
    """Whether a stop string stands in a response's last `reach` tokens."""
    text = decode(tail)
    return any(each in text for each in strings)


def first_stop(tokens: Sequence[int], sampling: Sampling, decode: Decode | None) -> int | None:
    """Length of a response up to its first stop, that included; None where there is none."""
    strings = sampling.stop_strings if decode is not None else ()
    back = reach(strings) if strings else 0
    for length, token in enumerate(tokens, 1):
        if token in sampling.stop_tokens:
            return length
        tail = tokens[max(0, length - back) : length]
        if strings and decode is not None and completes(tail, strings, decode):
            return length
    return None
