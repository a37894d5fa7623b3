"""What every model's configuration says, and the checks that its settings pass."""

from collections.abc import Mapping
from typing import Any, Protocol

from attrs import Attribute

from ms_parallel.cluster.layout import ModelShape
from ms_parallel.errors import ConfigError, ModelError
from ms_parallel.settings import number, whole

__all__ = [
    "MOST",
    "TOKENS",
    "ModelConfig",
    "TokenId",
    "above_zero",
    "check_heads",
    "size",
    "token_ids",
]

TokenId = int | tuple[int, ...] | None
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Settings that name the tokens which begin, end and pad a text."""


class ModelConfig(Protocol):
    """What every model's configuration tells the rest of the package."""

    @property
    def vocab_size(self) -> int:
        """V."""
        ...

    @property
    def hidden_size(self) -> int:
        """H."""
        ...

    @property
    def num_hidden_layers(self) -> int:
        """Blocks of the whole model."""
        ...

    @property
    def tie_word_embeddings(self) -> bool:
        """The head's weight is the embedding's."""
        ...

    @property
    def initializer_range(self) -> float:
        """Standard deviation of fresh weights."""
        ...

    @property
    def model_type(self) -> str:
        """The architecture's name in config.json."""
        ...

    @property
    def bos_token_id(self) -> TokenId:
        """What begins a text, if anything does."""
        ...

    @property
    def eos_token_id(self) -> TokenId:
        """What ends a generated text: one token, any of several, or nothing."""
        ...

    @property
    def pad_token_id(self) -> TokenId:
        """What fills a batch's shorter rows, if anything does."""
        ...

    @property
    def shape(self) -> ModelShape:
        """The sizes that a layout has to divide."""
        ...


MOST: Mapping[str, int] = {
    "num_hidden_layers": 10_000,
    "vocab_size": 1 << 27,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
}
"""Some ten times what any model has: beyond it a file is damaged, or made to take our memory."""


def size(instance: object, attribute: "Attribute[Any]", value: object) -> None:
    """Check for a whole number from 1 to the most that is reasonable; None passes where allowed."""
    most, optional = MOST.get(attribute.name, (1 << 62) - 1), attribute.default is None
    whole(most=most, optional=optional)(instance, attribute, value)


above_zero = number(least=1e-30)


def check_heads(queries: int, keys: int, head_dim: int) -> None:
    """Check that heads pair up.

    Raises:
        ConfigError: key-value heads do not divide the query heads, or the width is odd.
    """
    if queries % keys:
        raise ConfigError(
            f"num_key_value_heads={keys} does not divide num_attention_heads={queries};"
            f" choose a divisor"
        )
    if head_dim % 2:
        raise ConfigError(f"head_dim={head_dim} is odd; positions need an even width")


def token_ids(name: str, value: Any) -> Any:
    """One id, several as a tuple, or None; -1, which some files hold, is no token."""
    ids = value if isinstance(value, list) else [value]
    if value is None or value == -1:
        return None
    if not ids or any(type(token) is not int or not 0 <= token < 1 << 31 for token in ids):
        raise ModelError(f"{name} is {str(value)[:60]!r}; give a token id, a list of some, or null")
    return tuple(ids) if isinstance(value, list) else value
