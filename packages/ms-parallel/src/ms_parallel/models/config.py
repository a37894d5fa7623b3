"""What every model's configuration says, and the checks that its settings pass."""

from collections.abc import Mapping
from typing import Any

from attrs import Attribute, field, frozen

from ms_parallel.cluster.layout import ModelShape
from ms_parallel.errors import ConfigError, ModelError
from ms_parallel.settings import flag, number, whole

TokenId = int | tuple[int, ...] | None
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Settings that name the tokens which begin, end and pad a text."""


MOST: Mapping[str, int] = {
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
"""Some ten times what any model has: beyond it a file is damaged, or made to take our memory."""


def size(instance: object, attribute: "Attribute[Any]", value: object) -> None:
    """Check for a whole number from 1 to the most that is reasonable; None passes where allowed."""
    most, optional = MOST.get(attribute.name, (1 << 62) - 1), attribute.default is None
    whole(most=most, optional=optional)(instance, attribute, value)


above_zero = number(least=1e-30)


@frozen(kw_only=True)
class ModelConfig:
    """What every model's configuration says; the names are those of Hugging Face's config.json.

    Raises:
        ConfigError: a size is not a whole number of at least 1, or sizes do not fit one another.
    """

    model_type: str
    """The family, whose config.json is written."""
    vocab_size: int = field(validator=size)
    hidden_size: int = field(validator=size)
    intermediate_size: int = field(validator=size)
    num_hidden_layers: int = field(validator=size)
    num_attention_heads: int = field(validator=size)
    head_dim: int = field(validator=size)
    """Width of one head; need not be hidden_size / num_attention_heads."""
    tie_word_embeddings: bool = field(default=False, validator=flag)
    """The head's weight is the embedding's."""
    initializer_range: float = field(default=0.02, validator=above_zero)
    """Standard deviation of fresh weights."""
    bos_token_id: TokenId = None
    """What begins a text, if anything does."""
    eos_token_id: TokenId = None
    """What ends a generated text: one token, or any of several."""
    pad_token_id: TokenId = None
    """What fills a batch's shorter rows, if anything does."""

    @property
    def key_value_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_attention_heads

    @property
    def final_softcap(self) -> float | None:
        """What logits are bent to stay below."""
        return None

    @property
    def mixture(self) -> Any:
        """The `Mixture` of experts of the whole model, None where it has none."""
        return None

    @property
    def mtp_layers(self) -> int:
        """Layers behind the last one, each of which predicts one token further."""
        return 0

    @property
    def shape(self) -> ModelShape:
        """The sizes that a layout has to divide."""
        return ModelShape(
            layers=self.num_hidden_layers,
            attention_heads=self.num_attention_heads,
            key_value_heads=self.key_value_heads,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            vocab_size=self.vocab_size,
        )


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
    """Read one token id, several as a tuple, or None; -1, which some files hold, is no token."""
    ids = value if isinstance(value, list) else [value]
    if value is None or value == -1:
        return None
    if not ids or any(type(token) is not int or not 0 <= token < 1 << 31 for token in ids):
        raise ModelError(f"{name} is {str(value)[:60]!r}; give a token id, a list of some, or null")
    return tuple(ids) if isinstance(value, list) else value
