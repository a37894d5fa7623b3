"""What a decoder of the Llama family is made of."""

import math
from typing import Literal

from attrs import Attribute, field, frozen

from ms_parallel.errors import ConfigError
from ms_parallel.layout import ModelShape

__all__ = ["DecoderConfig", "RopeScaling"]

ModelType = Literal["llama", "mistral", "qwen2", "qwen3"]


def _positive(instance: object, attribute: "Attribute[int]", value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        name = attribute.name
        raise ConfigError(f"model setting {name} is {value!r}; give a whole number of at least 1")


def _above_zero(instance: object, attribute: "Attribute[float]", value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"model setting {attribute.name} is {value!r}; give a number")
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"model setting {attribute.name} is {value!r}; give a number above 0")


@frozen(kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched to longer contexts."""

    kind: Literal["linear", "llama3"]
    factor: float = field(validator=_above_zero)
    low_freq_factor: float = field(default=1.0, validator=_above_zero)
    """llama3: wavelengths above original/low are stretched fully."""
    high_freq_factor: float = field(default=4.0, validator=_above_zero)
    """llama3: wavelengths below original/high are left alone."""
    original_max_position_embeddings: int = field(default=8192, validator=_positive)
    """llama3: positions of the first pre-training."""


@frozen(kw_only=True)
class DecoderConfig:
    """A decoder of the Llama family; the names are those of Hugging Face's config.json.

    Raises:
        ConfigError: a size is not a whole number of at least 1, or sizes do not fit one another.
    """

    model_type: ModelType = "llama"
    """Which family's config.json is written."""
    vocab_size: int = field(validator=_positive)
    hidden_size: int = field(validator=_positive)
    intermediate_size: int = field(validator=_positive)
    num_hidden_layers: int = field(validator=_positive)
    num_attention_heads: int = field(validator=_positive)
    num_key_value_heads: int = field(validator=_positive)
    head_dim: int = field(validator=_positive)
    """Width of one head; need not be hidden_size / num_attention_heads."""
    rms_norm_eps: float = field(default=1e-6, validator=_above_zero)
    rope_theta: float = field(default=10000.0, validator=_above_zero)
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    """The head's weight is the embedding's."""
    attention_bias: bool = False
    """q, k and v projections have a bias."""
    attention_output_bias: bool = False
    """The output projection of attention has a bias."""
    mlp_bias: bool = False
    query_key_norm: bool = False
    """RMS norms over each head of q and k, before rotation."""
    max_position_embeddings: int = field(default=4096, validator=_positive)
    sliding_window: int | None = None
    """A position sees its last so many, itself included; None for all."""
    sliding_layers: tuple[int, ...] | None = None
    """Layers that the window applies to; None for all."""
    initializer_range: float = field(default=0.02, validator=_above_zero)
    """Standard deviation of fresh weights."""

    def __attrs_post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_key_value_heads={self.num_key_value_heads} does not divide"
                f" num_attention_heads={self.num_attention_heads}; choose a divisor"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim} is odd; rotary needs an even width")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ConfigError(f"sliding_window={self.sliding_window}; give at least 1 or none")

    @property
    def shape(self) -> ModelShape:
        """The sizes that a layout has to divide."""
        return ModelShape(
            layers=self.num_hidden_layers,
            attention_heads=self.num_attention_heads,
            key_value_heads=self.num_key_value_heads,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            vocab_size=self.vocab_size,
        )

    def window(self, layer: int) -> int | None:
        """The window of one layer, None where it sees everything before."""
        if self.sliding_layers is not None and layer not in self.sliding_layers:
            return None
        return self.sliding_window
