"""What a decoder of the Llama kind is made of."""

from collections.abc import Mapping
from typing import Any, Literal

from attrs import field, fields, frozen

from ms_parallel.cluster.layout import ModelShape
from ms_parallel.errors import ConfigError
from ms_parallel.models.config import TokenId, above_zero, check_heads, size
from ms_parallel.models.family import families
from ms_parallel.settings import flag, nearest

__all__ = ["DecoderConfig", "RopeScaling"]


@frozen(kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched to longer contexts."""

    kind: Literal["linear", "llama3"]
    factor: float = field(validator=above_zero)
    low_freq_factor: float = field(default=1.0, validator=above_zero)
    """llama3: wavelengths above original/low are stretched fully."""
    high_freq_factor: float = field(default=4.0, validator=above_zero)
    """llama3: wavelengths below original/high are left alone."""
    original_max_position_embeddings: int = field(default=8192, validator=size)
    """llama3: positions of the first pre-training."""

    def __attrs_post_init__(self) -> None:
        if self.kind not in ("linear", "llama3"):
            shown = repr(self.kind)[:60]
            raise ConfigError(f"unknown rope scaling {shown}; known: linear, llama3")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"rope scaling high_freq_factor={self.high_freq_factor} must be above"
                f" low_freq_factor={self.low_freq_factor}"
            )


def _rope_scaling(value: Any) -> Any:
    """Take a mapping of settings for the value that they are of."""
    if not isinstance(value, Mapping):
        return value
    known = [setting.name for setting in fields(RopeScaling)]
    for key in value:
        if key not in known:
            raise ConfigError(f"unknown rope_scaling setting {key!r}; {nearest(key, known)}")
    missing = [each for each in ("kind", "factor") if each not in value]
    if missing:
        raise ConfigError(f"rope_scaling lacks {missing[0]!r}; give kind and factor")
    return RopeScaling(**value)


@frozen(kw_only=True)
class DecoderConfig:
    """A decoder of the Llama family; the names are those of Hugging Face's config.json.

    Raises:
        ConfigError: a size is not a whole number of at least 1, or sizes do not fit one another.
    """

    model_type: str = "llama"
    """The family, whose config.json is written."""
    vocab_size: int = field(validator=size)
    hidden_size: int = field(validator=size)
    intermediate_size: int = field(validator=size)
    num_hidden_layers: int = field(validator=size)
    num_attention_heads: int = field(validator=size)
    num_key_value_heads: int = field(validator=size)
    head_dim: int = field(validator=size)
    """Width of one head; need not be hidden_size / num_attention_heads."""
    rms_norm_eps: float = field(default=1e-6, validator=above_zero)
    rope_theta: float = field(default=10000.0, validator=above_zero)
    rope_scaling: RopeScaling | None = field(default=None, converter=_rope_scaling)
    """A mapping of its settings will do."""
    tie_word_embeddings: bool = field(default=False, validator=flag)
    """The head's weight is the embedding's."""
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
    initializer_range: float = field(default=0.02, validator=above_zero)
    """Standard deviation of fresh weights."""
    bos_token_id: TokenId = None
    """Carried to and from config.json, like the last one."""
    eos_token_id: TokenId = None
    """What ends a generated text: one token, or any of several."""
    pad_token_id: TokenId = None

    def __attrs_post_init__(self) -> None:
        check_heads(self.num_attention_heads, self.num_key_value_heads, self.head_dim)
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
        known = {each.name: each for each in families() if each.config is DecoderConfig}
        if self.model_type not in known:
            raise ConfigError(f"unknown model_type {self.model_type!r}; known: {', '.join(known)}")
        return known[self.model_type]

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

    @property
    def attention_output_bias(self) -> bool:
        """Whether the output projection of attention has a bias."""
        return self.attention_bias and bool(self.family.output_bias)

    def window(self, layer: int) -> int | None:
        """The window of one layer, None where it sees everything before."""
        if self.sliding_layers is not None and layer not in self.sliding_layers:
            return None
        return self.sliding_window
