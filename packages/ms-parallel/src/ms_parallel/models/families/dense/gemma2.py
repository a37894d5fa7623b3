"""Gemma 2 (Gemma team, 2024, arXiv:2408.00118): four norms a layer, soft caps, windows by turns."""

import math

from attrs import field, frozen
from torch import nn

from ms_parallel.models.config import size
from ms_parallel.models.decoder import plan_with
from ms_parallel.models.decoder_config import DecoderConfig
from ms_parallel.models.dense import DenseFamily
from ms_parallel.models.parts.attention import Attention
from ms_parallel.models.parts.block import Block, Norms
from ms_parallel.models.parts.feed_forward import FeedForward
from ms_parallel.models.parts.norm import UnitOffsetNorm
from ms_parallel.models.plan import ModelPlan
from ms_parallel.models.positions.windows import ByPattern
from ms_parallel.operators.protocol import Ops
from ms_parallel.settings import number

NORMS = Norms(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
_softcap = number(least=1e-30, optional=True)


@frozen(kw_only=True)
class GemmaConfig(DecoderConfig):
    """What Gemma 2 and 3 have in common.

    Raises:
        ConfigError: a size is not a whole number of at least 1, or sizes do not fit one another.
    """

    sliding_window: int = field(default=4096, validator=size)
    """A position of a sliding layer sees its last so many, itself included."""
    query_pre_attn_scalar: int = field(default=256, validator=size)
    """Scores are divided by its root."""
    final_logit_softcapping: float | None = field(default=None, validator=_softcap)
    """What logits are bent to stay below."""

    @property
    def attention_scale(self) -> float:
        """What scores are multiplied by."""
        return 1.0 / math.sqrt(self.query_pre_attn_scalar)

    @property
    def embedding_scale(self) -> float:
        """What embeddings are multiplied by."""
        return math.sqrt(self.hidden_size)

    @property
    def final_softcap(self) -> float | None:
        """What logits are bent to stay below."""
        return self.final_logit_softcapping


@frozen(kw_only=True)
class Gemma2Config(GemmaConfig):
    """A Gemma 2; every other layer slides, beginning with the first.

    Raises:
        ConfigError: a size is not a whole number of at least 1, or sizes do not fit one another.
    """

    model_type: str = "gemma2"
    final_logit_softcapping: float | None = field(default=30.0, validator=_softcap)
    """What logits are bent to stay below."""
    attn_logit_softcapping: float | None = field(default=50.0, validator=_softcap)
    """What scores are bent to stay below."""

    def window(self, layer: int) -> int | None:
        """Return the window of one layer, None where it sees everything before."""
        slides = layer % 2 == 0 if self.sliding_layers is None else layer in self.sliding_layers
        return self.sliding_window if slides else None


def gemma_block(
    config: GemmaConfig, layer: int, ops: Ops, *, softcap: float | None = None
) -> nn.Module:
    """Build a layer with four norms and GEGLU."""
    return Block(
        config,
        layer,
        ops,
        attention=Attention(config, layer, ops, norm=UnitOffsetNorm, softcap=softcap),
        mlp=FeedForward(config, ops, gate=lambda g, up: ops.geglu(g, up, approximate="tanh")),
        norm=UnitOffsetNorm,
        norms=NORMS,
    )


def gemma_plan(config: GemmaConfig) -> ModelPlan:
    """Plan how a Gemma may be split."""
    return plan_with(config, norms=NORMS)


def _block(config: Gemma2Config, layer: int, ops: Ops) -> nn.Module:
    return gemma_block(config, layer, ops, softcap=config.attn_logit_softcapping)


FAMILY = DenseFamily(
    name="gemma2",
    config=Gemma2Config,
    block=_block,
    norm=UnitOffsetNorm,
    plan=gemma_plan,
    transformers_class="Gemma2ForCausalLM",
    fixed={"mlp_bias": False, "query_key_norm": False},
    null_key_heads=False,
    silent={
        "max_position_embeddings": 8192,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    neutral={
        "hidden_act": ("gelu_pytorch_tanh",),  # which `hidden_activation` replaced
        "use_bidirectional_attention": (False, None),
        "cache_implementation": ("hybrid", None),
    },
    activation={"hidden_activation": "gelu_pytorch_tanh"},
    windows=ByPattern(slides=lambda _, layer: layer % 2 == 0),
    whole_heads=True,
    small={"tie_word_embeddings": True, "query_pre_attn_scalar": 32, "sliding_window": 1024},
)
