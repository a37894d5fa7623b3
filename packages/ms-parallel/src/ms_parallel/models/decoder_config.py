"""The configuration of a decoder of the Llama kind."""

from typing import Any

from attrs import field, frozen

from ms_parallel.errors import ConfigError
from ms_parallel.models.config import ModelConfig, above_zero, check_heads, size
from ms_parallel.models.family import families
from ms_parallel.models.positions.scaling import Rope, RopeScaling, as_rope_scaling
from ms_parallel.settings import flag


@frozen(kw_only=True)
class DecoderConfig(ModelConfig):
    """A decoder of the Llama kind.

    A family with settings of its own has a subclass in its file; in config.json they stand by
    their own names. The properties below are what blocks ask, for a subclass to answer otherwise.

    Raises:
        ConfigError: a size is not a whole number of at least 1, or sizes do not fit one another.
    """

    model_type: str = "llama"
    num_key_value_heads: int = field(validator=size)
    rms_norm_eps: float = field(default=1e-6, validator=above_zero)
    rope_theta: float = field(default=10000.0, validator=above_zero)
    rope_scaling: RopeScaling | None = field(default=None, converter=as_rope_scaling)
    """How rotary frequencies are stretched; a mapping of its settings will do."""
    attention_bias: bool = field(default=False, validator=flag)
    """q, k and v projections have a bias; so has the output projection, but for qwen2."""
    mlp_bias: bool = field(default=False, validator=flag)
    query_key_norm: bool = field(default=False, validator=flag)
    """RMS norms over each head of q and k, before rotation."""
    max_position_embeddings: int = field(default=4096, validator=size)
    sliding_window: int | None = field(default=None, validator=size)
    """A position sees its last so many, itself included; None for all."""
    sliding_layers: tuple[int, ...] | None = None
    """Layers that the window applies to; None for all."""

    def __attrs_post_init__(self) -> None:
        check_heads(self.num_attention_heads, self.num_key_value_heads, self.head_dim)
        _ = self.ropes  # which refuse what does not fit
        self.family.check(self)
        for layer in self.sliding_layers or ():
            if type(layer) is not int or not 0 <= layer < self.num_hidden_layers:
                raise ConfigError(
                    f"model setting sliding_layers has {layer!r}; give numbers of layers, from 0 to"
                    f" {self.num_hidden_layers - 1}"
                )

    @property
    def family(self) -> Any:
        """The `DenseFamily` that `model_type` names.

        Raises:
            ConfigError: it names no family of decoders.
        """
        known = {each.name: each for each in families() if issubclass(each.config, DecoderConfig)}
        found = known.get(self.model_type)
        if found is None:
            raise ConfigError(f"unknown model_type {self.model_type!r}; known: {', '.join(known)}")
        if type(self) is not found.config:
            raise ConfigError(
                f"model_type {self.model_type!r} is configured by {found.config.__name__}, not by"
                f" {type(self).__name__}; use architecture({self.model_type!r}, ...)"
            )
        return found

    @property
    def key_value_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_key_value_heads

    @property
    def attention_output_bias(self) -> bool:
        """Whether the output projection of attention has a bias."""
        return self.attention_bias and bool(self.family.output_bias)

    def window(self, layer: int) -> int | None:
        """Return the window of one layer, None where it sees everything before."""
        if self.sliding_layers is not None and layer not in self.sliding_layers:
            return None
        return self.sliding_window

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The rotary positions that its layers use."""
        rope = Rope(
            theta=self.rope_theta,
            width=self.rotary_width,
            scaling=self.rope_scaling,
            max_position_embeddings=self.max_position_embeddings,
        )
        return (rope,)

    def rope_of(self, layer: int) -> int | None:
        """Return the index in `ropes` of what one layer uses; None where it has no positions."""
        return 0

    @property
    def rotary_width(self) -> int:
        """Dims of a head that turn."""
        return self.head_dim

    @property
    def rotary_interleaved(self) -> bool:
        """Whether neighbouring dims turn together, instead of halves."""
        return False

    @property
    def attention_scale(self) -> float | None:
        """What scores are multiplied by; None for 1/√head_dim."""
        return None

    @property
    def embedding_scale(self) -> float | None:
        """What embeddings are multiplied by, rounded to their dtype; None for nothing."""
        return None

    @property
    def logit_divisor(self) -> float:
        """What logits are divided by."""
        return 1.0
