"""Sampling settings; importing them needs no torch, so that run files are checked at once."""

from collections.abc import Iterable
from typing import Any, cast

from attrs import field, frozen

from ms_align.errors import ConfigError
from ms_align.settings import number, shown, whole

TOKENS = 2**31
"""More than any vocabulary has."""


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < TOKENS


def _shown(value: object) -> str:
    """Write the value as a message may hold it, huge numbers in a list too."""
    return f"[{', '.join(map(shown, value))}]" if isinstance(value, list) else shown(value)


def token_numbers(value: object) -> tuple[int, ...]:
    """Read a setting that is one token's number, or several."""
    given = tuple(value) if isinstance(value, Iterable) else (value,)
    if not all(_is_token(token) for token in given):
        several = list(given) if isinstance(value, Iterable) else value
        raise ConfigError(
            f"stop_tokens is {_shown(several)}; give token numbers of at least 0, below {TOKENS}"
        )
    return given


def _strings(value: object) -> tuple[str, ...]:
    several = isinstance(value, Iterable) and not isinstance(value, str)
    given = tuple(cast("Iterable[Any]", value)) if several else (value,)
    if not all(isinstance(text, str) and text for text in given):
        shown = list(given) if several else value
        raise ConfigError(f"stop_strings is {shown!r}; give texts that are not empty")
    return given


@frozen(kw_only=True, slots=False)
class Sampling:
    """How responses are drawn."""

    max_new_tokens: int = field(default=64, validator=whole())
    """Tokens of a response at most."""
    temperature: float = field(default=1.0, validator=number())
    """Divides the logits; 0 always takes the likeliest token, whose log-probability is then that
    at temperature 1."""
    top_k: int | None = field(default=None, validator=whole(optional=True))
    """Only so many likeliest tokens are ever drawn."""
    top_p: float = field(default=1.0, validator=number(least=1e-6, most=1.0))
    """Only the likeliest tokens that together reach this probability are ever drawn."""
    min_p: float = field(default=0.0, validator=number(most=1.0))
    """Only tokens of at least this share of the likeliest one's probability are ever drawn."""
    stop_tokens: tuple[int, ...] = field(default=(), converter=token_numbers)
    """Each ends a response, and is its last token."""
    stop_strings: tuple[str, ...] = field(default=(), converter=_strings)
    """A response ends with the token that completes one of them."""

    @property
    def policy_temperature(self) -> float:
        """Temperature of the policy's log-probabilities: 1 where tokens are not drawn."""
        return self.temperature or 1.0

    @property
    def cuts(self) -> bool:
        """Whether some tokens are never drawn."""
        return self.top_k is not None or self.top_p < 1.0 or self.min_p > 0.0
