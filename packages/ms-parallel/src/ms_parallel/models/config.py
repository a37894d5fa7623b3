"""What a decoder of the Llama family is made of."""

import sys
from collections.abc import Mapping
from typing import Literal, Protocol

from attrs import Attribute, field, frozen
from attrs.validators import optional

from ms_parallel.cluster.layout import ModelShape
from ms_parallel.errors import ConfigError

__all__ = ["MOST", "DecoderConfig", "ModelConfig", "RopeScaling", "TokenId"]

ModelType = Literal["llama", "mistral", "qwen2", "qwen3"]
TokenId = int | tuple[int, ...] | None

_FAMILIES: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    "llama": {"query_key_norm": (False,), "sliding_window": (None,), "sliding_layers": (None,)},
    "mistral": {
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "query_key_norm": (False,),
    },
    "qwen2": {"attention_bias": (True,), "mlp_bias": (False,), "query_key_norm": (False,)},
    "qwen3": {"mlp_bias": (False,), "query_key_norm": (True,)},
}
"""What each family's files can express, where it is not free."""


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


def positive(instance: object, attribute: "Attribute[int]", value: object) -> None:
    """Validator: a whole number from 1 to the most that is reasonable."""
    name, shown = attribute.name, repr(value)[:60]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"model setting {name} is {shown}; give a whole number of at least 1")
    most = MOST.get(name, (1 << 62) - 1)
    if value > most:
        raise ConfigError(f"model setting {name}={shown} is beyond reason; give at most {most}")


def above_zero(instance: object, attribute: "Attribute[float]", value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"model setting {attribute.name} is {repr(value)[:60]}; give a number")
    # An int of 400 digits has no float; a float never exceeds this.
    if not (0 < value <= sys.float_info.max):
        raise ConfigError(
            f"model setting {attribute.name} is {repr(value)[:60]}; give a number above 0"
        )


def boolean(instance: object, attribute: "Attribute[bool]", value: object) -> None:
    """Validator: true or false."""
    if not isinstance(value, bool):
        shown = repr(value)[:60]
        raise ConfigError(f"model setting {attribute.name} is {shown}; give true or false")


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


def _families_with(name: str, value: object) -> str:
    families = [f for f, allowed in _FAMILIES.items() if value in allowed.get(name, (value,))]
    return "model_type " + " or ".join(families)


@frozen(kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched to longer contexts."""

    kind: Literal["linear", "llama3"]
    factor: float = field(validator=above_zero)
    low_freq_factor: float = field(default=1.0, validator=above_zero)
    """llama3: wavelengths above original/low are stretched fully."""
    high_freq_factor: float = field(default=4.0, validator=above_zero)
    """llama3: wavelengths below original/high are left alone."""
    original_max_position_embeddings: int = field(default=8192, validator=positive)
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


@frozen(kw_only=True)
class DecoderConfig:
    """A decoder of the Llama family; the names are those of Hugging Face's config.json.

    Raises:
        ConfigError: a size is not a whole number of at least 1, or sizes do not fit one another.
    """

    model_type: ModelType = "llama"
    """Which family's config.json is written."""
    vocab_size: int = field(validator=positive)
    hidden_size: int = field(validator=positive)
    intermediate_size: int = field(validator=positive)
    num_hidden_layers: int = field(validator=positive)
    num_attention_heads: int = field(validator=positive)
    num_key_value_heads: int = field(validator=positive)
    head_dim: int = field(validator=positive)
    """Width of one head; need not be hidden_size / num_attention_heads."""
    rms_norm_eps: float = field(default=1e-6, validator=above_zero)
    rope_theta: float = field(default=10000.0, validator=above_zero)
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = field(default=False, validator=boolean)
    """The head's weight is the embedding's."""
    attention_bias: bool = field(default=False, validator=boolean)
    """q, k and v projections have a bias; so has the output projection, but for qwen2."""
    mlp_bias: bool = field(default=False, validator=boolean)
    query_key_norm: bool = field(default=False, validator=boolean)
    """RMS norms over each head of q and k, before rotation."""
    max_position_embeddings: int = field(default=4096, validator=positive)
    sliding_window: int | None = field(default=None, validator=optional(positive))
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
        allowed = _FAMILIES.get(self.model_type)
        if allowed is None:
            raise ConfigError(
                f"unknown model_type {self.model_type!r}; known: {', '.join(_FAMILIES)}"
            )
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ConfigError(
                    f"model_type {self.model_type!r} has no {name}={getattr(self, name)};"
                    f" choose {_families_with(name, getattr(self, name))}"
                )

        if self.model_type == "llama" and self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads="
                f"{self.num_attention_heads}, as transformers wants it of llama; choose a multiple,"
                " or model_type mistral, qwen2 or qwen3"
            )
        for layer in self.sliding_layers or ():
            if type(layer) is not int or not 0 <= layer < self.num_hidden_layers:
                raise ConfigError(
                    f"model setting sliding_layers has {layer!r}; give numbers of layers, from 0 to"
                    f" {self.num_hidden_layers - 1}"
                )

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
        return self.attention_bias and self.model_type != "qwen2"

    def window(self, layer: int) -> int | None:
        """The window of one layer, None where it sees everything before."""
        if self.sliding_layers is not None and layer not in self.sliding_layers:
            return None
        return self.sliding_window
