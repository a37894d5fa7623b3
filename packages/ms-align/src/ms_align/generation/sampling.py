"""Sampling settings. This module does not import torch, so that run files are checked quickly."""

from collections.abc import Iterable
from typing import Any, cast

from attrs import field, frozen

from ms_align.errors import ConfigError
from ms_align.settings import integer, number, short_repr

TOKEN_ID_LIMIT = 2**31
"""Upper bound of token ids."""


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < TOKEN_ID_LIMIT


def _shown(value: object) -> str:
    """Format a value for a message, abbreviating huge numbers in lists as well."""
    return (
        f"[{', '.join(map(short_repr, value))}]" if isinstance(value, list) else short_repr(value)
    )


def token_ids(value: object) -> tuple[int, ...]:
    """Convert a setting with one token id or several."""
    ids = tuple(value) if isinstance(value, Iterable) else (value,)
    if not all(_is_token(token) for token in ids):
        original = list(ids) if isinstance(value, Iterable) else value
        raise ConfigError(
            f"stop_token_ids must be token ids from 0 to below {TOKEN_ID_LIMIT}, got "
            f"{_shown(original)}; correct them"
        )
    return ids


def _strings(value: object) -> tuple[str, ...]:
    is_list = isinstance(value, Iterable) and not isinstance(value, str)
    strings = tuple(cast("Iterable[Any]", value)) if is_list else (value,)
    if not all(isinstance(text, str) and text for text in strings):
        original = list(strings) if is_list else value
        raise ConfigError(
            f"stop_strings must be non-empty texts, got {short_repr(original)}; correct them"
        )
    return strings


@frozen(kw_only=True, slots=False)
class Sampling:
    """Sampling of responses."""

    max_new_tokens: int = field(default=64, validator=integer())
    """Maximum number of tokens in a response."""
    temperature: float = field(default=1.0, validator=number())
    """Sampling temperature; 0 for greedy decoding, with log-probabilities at temperature 1."""
    top_k: int | None = field(default=None, validator=integer(optional=True))
    """Sample from the k most likely tokens. Default: no limit."""
    top_p: float = field(default=1.0, validator=number(minimum=1e-6, maximum=1.0))
    """Sample from the most likely tokens that together reach this probability."""
    min_p: float = field(default=0.0, validator=number(maximum=1.0))
    """Minimum probability of a token, as a fraction of the most likely token's."""
    stop_token_ids: tuple[int, ...] = field(default=(), converter=token_ids)
    """Token ids that end a response; the stop token is included."""
    stop_strings: tuple[str, ...] = field(default=(), converter=_strings)
    """Texts that end a response; the token that completes one is included."""

    @property
    def policy_temperature(self) -> float:
        """Temperature of the policy's log-probabilities; 1 for greedy decoding."""
        return self.temperature or 1.0

    @property
    def truncates(self) -> bool:
        """True if top-k, top-p or min-p exclude tokens."""
        return self.top_k is not None or self.top_p < 1.0 or self.min_p > 0.0
