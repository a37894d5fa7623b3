"""Granite (IBM, 2024): Llama with multipliers of embeddings, scores, residuals and logits."""

from attrs import field, frozen
from torch import nn

from ms_parallel.models.config import above_zero
from ms_parallel.models.decoder_config import DecoderConfig
from ms_parallel.models.dense import DenseFamily
from ms_parallel.models.parts.block import Block
from ms_parallel.operators.protocol import Ops


@frozen(kw_only=True)
class GraniteConfig(DecoderConfig):
    """A Granite.

    Raises:
        ConfigError: a size is not a whole number of at least 1, or sizes do not fit one another.
    """

    model_type: str = "granite"
    embedding_multiplier: float = field(default=1.0, validator=above_zero)
    attention_multiplier: float = field(default=1.0, validator=above_zero)
    """What scores are multiplied by, in place of 1/√head_dim."""
    residual_multiplier: float = field(default=1.0, validator=above_zero)
    """What each half of a layer is multiplied by before it is added."""
    logits_scaling: float = field(default=1.0, validator=above_zero)
    """What logits are divided by."""

    @property
    def embedding_scale(self) -> float | None:
        """What embeddings are multiplied by."""
        return None if self.embedding_multiplier == 1.0 else self.embedding_multiplier

    @property
    def attention_scale(self) -> float:
        """What scores are multiplied by."""
        return self.attention_multiplier

    @property
    def logit_divisor(self) -> float:
        """What logits are divided by."""
        return self.logits_scaling


def _block(config: GraniteConfig, layer: int, ops: Ops) -> nn.Module:
    return Block(config, layer, ops, residual=config.residual_multiplier)


FAMILY = DenseFamily(
    name="granite",
    config=GraniteConfig,
    block=_block,
    transformers_class="GraniteForCausalLM",
    fixed={"query_key_norm": False},
    silent={"max_position_embeddings": 2048},
    small={"attention_multiplier": 32**-0.5},
)
