"""Base class of model configurations, and validators of its settings."""

from collections.abc import Mapping
from typing import Any

from attrs import Attribute, field, frozen

from ms_parallel.cluster.layout import ModelShape
from ms_parallel.errors import ConfigError, ModelError
from ms_parallel.settings import flag, integer, number

TokenId = int | tuple[int, ...] | None
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Settings with the begin, end and padding tokens."""

SIZE_LIMITS: Mapping[str, int] = {
    "num_hidden_layers": 10_000,
    "vocab_size": 1 << 27,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "moe_intermediate_size": 1 << 24,
    "num_experts": 1 << 13,
    "num_local_experts": 1 << 13,
    "n_routed_experts": 1 << 13,
    "num_experts_per_tok": 1 << 13,
}
"""Upper limits, about ten times the largest known model; more means a damaged or hostile file."""


def size(instance: object, attribute: "Attribute[Any]", value: object) -> None:
    """Check for an integer from 1 to the setting's limit; None passes if it is the default."""
    limit, optional = SIZE_LIMITS.get(attribute.name, (1 << 62) - 1), attribute.default is None
    integer(maximum=limit, optional=optional)(instance, attribute, value)


above_zero = number(minimum=1e-30)


@frozen(kw_only=True)
class ModelConfig:
    """Base configuration of all models; settings have the names of Hugging Face's config.json.

    Raises:
        ConfigError: a size is not a positive integer, or sizes are inconsistent.
    """

    model_type: str
    """Model family, as in config.json."""
    vocab_size: int = field(validator=size)
    hidden_size: int = field(validator=size)
    intermediate_size: int = field(validator=size)
    num_hidden_layers: int = field(validator=size)
    num_attention_heads: int = field(validator=size)
    head_dim: int = field(validator=size)
    """Head width; may differ from hidden_size / num_attention_heads."""
    tie_word_embeddings: bool = field(default=False, validator=flag)
    """Whether the output head shares the embedding weight."""
    initializer_range: float = field(default=0.02, validator=above_zero)
    """Standard deviation of initial weights."""
    bos_token_id: TokenId = None
    """Begin-of-text token; None for none."""
    eos_token_id: TokenId = None
    """End-of-text token or tokens; any of them ends generation."""
    pad_token_id: TokenId = None
    """Padding token; None for none."""

    @property
    def key_value_heads(self) -> int:
        """Number of key-value heads."""
        return self.num_attention_heads

    @property
    def final_softcap(self) -> float | None:
        """Soft cap on the logits; None for no cap."""
        return None

    @property
    def mixture(self) -> Any:
        """Mixture-of-experts settings (`Mixture`); None for a dense model."""
        return None

    @property
    def mtp_layers(self) -> int:
        """Number of multi-token prediction layers."""
        return 0

    @property
    def shape(self) -> ModelShape:
        """Sizes that a parallel layout must divide."""
        return ModelShape(
            layers=self.num_hidden_layers,
            attention_heads=self.num_attention_heads,
            key_value_heads=self.key_value_heads,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            vocab_size=self.vocab_size,
        )


def check_heads(queries: int, keys: int, head_dim: int) -> None:
    """Check that key-value heads divide query heads and the head width is even.

    Raises:
        ConfigError: key-value heads do not divide the query heads, or the width is odd.
    """
    if queries % keys:
        raise ConfigError(
            f"num_key_value_heads must divide num_attention_heads={queries}, got {keys}"
        )
    if head_dim % 2:
        raise ConfigError(f"head_dim must be even for rotary positions, got {head_dim}")


def token_ids(name: str, value: Any) -> Any:
    """Parse a token id, a list of ids (returned as a tuple), or null; -1 also means null."""
    ids = value if isinstance(value, list) else [value]
    if value is None or value == -1:
        return None
    if not ids or any(type(token) is not int or not 0 <= token < 1 << 31 for token in ids):
        raise ModelError(
            f"{name} must be a token id, a list of token ids, or null, got {str(value)[:60]!r}"
        )
    return tuple(ids) if isinstance(value, list) else value
