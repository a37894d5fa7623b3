"""Granite (IBM, 2024): Llama with scaled embeddings, attention scores, residuals and logits."""

from attrs import field, frozen
from torch import nn

from ms_parallel.models.config import above_zero
from ms_parallel.models.decoder_config import DecoderConfig
from ms_parallel.models.decoder_family import DecoderFamily
from ms_parallel.models.parts.block import Block
from ms_parallel.operators.protocol import Ops


@frozen(kw_only=True)
class GraniteConfig(DecoderConfig):
    """Configuration of Granite.

    Raises:
        ConfigError: a size is not a positive integer, or sizes are inconsistent.
    """

    model_type: str = "granite"
    embedding_multiplier: float = field(default=1.0, validator=above_zero)
    attention_multiplier: float = field(default=1.0, validator=above_zero)
    """Factor on the attention scores, instead of 1/√head_dim."""
    residual_multiplier: float = field(default=1.0, validator=above_zero)
    """Factor on the outputs of attention and mlp before they are added."""
    logits_scaling: float = field(default=1.0, validator=above_zero)
    """Divisor of the logits."""

    @property
    def embedding_scale(self) -> float | None:
        """Factor on the embeddings; None for no scaling."""
        return None if self.embedding_multiplier == 1.0 else self.embedding_multiplier

    @property
    def attention_scale(self) -> float:
        """Factor on the attention scores."""
        return self.attention_multiplier

    @property
    def logit_divisor(self) -> float:
        """Divisor of the logits."""
        return self.logits_scaling


def _block(config: GraniteConfig, layer: int, ops: Ops) -> nn.Module:
    return Block(config, layer, ops, residual=config.residual_multiplier)


FAMILY = DecoderFamily(
    name="granite",
    config=GraniteConfig,
    block=_block,
    transformers_class="GraniteForCausalLM",
    fixed={"query_key_norm": False},
    transformers_defaults={"max_position_embeddings": 2048},
    small={"attention_multiplier": 32**-0.5},
)
