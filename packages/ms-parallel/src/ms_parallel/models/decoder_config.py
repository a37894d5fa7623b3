"""Configuration of Llama-style decoders."""

from typing import Any

from attrs import field, frozen

from ms_parallel.errors import ConfigError
from ms_parallel.models.config import ModelConfig, above_zero, check_heads, size
from ms_parallel.models.family import families
from ms_parallel.models.positions.scaling import Rope, RopeScaling, as_rope_scaling
from ms_parallel.settings import flag


@frozen(kw_only=True)
class DecoderConfig(ModelConfig):
    """Configuration of a Llama-style decoder.

    A family with additional settings defines a subclass in its module; config.json uses the same
    setting names. Blocks read the properties below, which subclasses may override.

    Raises:
        ConfigError: a size is not a positive integer, or sizes are inconsistent.
    """

    model_type: str = "llama"
    num_key_value_heads: int = field(validator=size)
    rms_norm_eps: float = field(default=1e-6, validator=above_zero)
    rope_theta: float = field(default=10000.0, validator=above_zero)
    rope_scaling: RopeScaling | None = field(default=None, converter=as_rope_scaling)
    """Rotary frequency scaling, or a mapping of its settings."""
    attention_bias: bool = field(default=False, validator=flag)
    """Whether q, k and v projections have a bias; also the output projection, except in qwen2."""
    mlp_bias: bool = field(default=False, validator=flag)
    query_key_norm: bool = field(default=False, validator=flag)
    """RMS norms over each head of q and k, before rotation."""
    max_position_embeddings: int = field(default=4096, validator=size)
    sliding_window: int | None = field(default=None, validator=size)
    """Attention window in positions, including the query's; None for full attention."""
    sliding_layers: tuple[int, ...] | None = None
    """Layers with the sliding window; None for all."""

    def __attrs_post_init__(self) -> None:
        check_heads(self.num_attention_heads, self.num_key_value_heads, self.head_dim)
        _ = self.ropes  # validates the rotary settings
        self.family.check(self)
        for layer in self.sliding_layers or ():
            if type(layer) is not int or not 0 <= layer < self.num_hidden_layers:
                raise ConfigError(
                    "sliding_layers must be layer indices from 0 to"
                    f" {self.num_hidden_layers - 1}, got {layer!r}"
                )

    @property
    def family(self) -> Any:
        """The `DecoderFamily` named by `model_type`.

        Raises:
            ConfigError: `model_type` is not a decoder family or belongs to another config class.
        """
        decoders = {f.name: f for f in families() if issubclass(f.config, DecoderConfig)}
        family = decoders.get(self.model_type)
        if family is None:
            raise ConfigError(
                f"unknown model_type {self.model_type!r}; known: {', '.join(decoders)}"
            )
        if type(self) is not family.config:
            raise ConfigError(
                f"model_type {self.model_type!r} needs {family.config.__name__}, got"
                f" {type(self).__name__}; use architecture({self.model_type!r}, ...)"
            )
        return family

    @property
    def key_value_heads(self) -> int:
        """Number of key-value heads."""
        return self.num_key_value_heads

    @property
    def attention_output_bias(self) -> bool:
        """Whether the output projection of attention has a bias."""
        return self.attention_bias and bool(self.family.output_bias)

    def window(self, layer: int) -> int | None:
        """Return the attention window of a layer; None for full attention."""
        if self.sliding_layers is not None and layer not in self.sliding_layers:
            return None
        return self.sliding_window

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """Rotary embeddings used by the layers."""
        rope = Rope(
            theta=self.rope_theta,
            width=self.rotary_width,
            scaling=self.rope_scaling,
            max_position_embeddings=self.max_position_embeddings,
        )
        return (rope,)

    def rope_of(self, layer: int) -> int | None:
        """Return a layer's index into `ropes`; None for a layer without positions."""
        return 0

    @property
    def rotary_width(self) -> int:
        """Number of rotated dims per head."""
        return self.head_dim

    @property
    def rotary_interleaved(self) -> bool:
        """Whether rotation pairs adjacent dims instead of halves."""
        return False

    @property
    def attention_scale(self) -> float | None:
        """Factor on the attention scores; None for 1/√head_dim."""
        return None

    @property
    def embedding_scale(self) -> float | None:
        """Factor on the embeddings, rounded to their dtype; None for no scaling."""
        return None

    @property
    def logit_divisor(self) -> float:
        """Divisor of the logits."""
        return 1.0
