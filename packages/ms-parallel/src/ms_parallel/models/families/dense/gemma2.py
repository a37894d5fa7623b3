"""Gemma 2 (Gemma Team, 2024, arXiv:2408.00118): post-norms, soft caps, alternating windows."""

import math

from attrs import field, frozen
from torch import nn

from ms_parallel.models.config import size
from ms_parallel.models.decoder import plan_with
from ms_parallel.models.decoder_config import DecoderConfig
from ms_parallel.models.decoder_family import DecoderFamily
from ms_parallel.models.parts.attention import Attention
from ms_parallel.models.parts.block import Block, Norms
from ms_parallel.models.parts.feed_forward import FeedForward
from ms_parallel.models.parts.norm import UnitOffsetNorm
from ms_parallel.models.plan import ModelPlan
from ms_parallel.models.positions.window_format import PatternLayers
from ms_parallel.operators.protocol import Ops
from ms_parallel.settings import number

NORMS = Norms(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
_softcap = number(minimum=1e-30, optional=True)


@frozen(kw_only=True)
class GemmaConfig(DecoderConfig):
    """Settings common to Gemma 2 and 3.

    Raises:
        ConfigError: a size is not a positive integer, or sizes are inconsistent.
    """

    sliding_window: int = field(default=4096, validator=size)
    """Attention window of sliding layers in positions, including the query's."""
    query_pre_attn_scalar: int = field(default=256, validator=size)
    """Attention scores are divided by the square root of this."""
    final_logit_softcapping: float | None = field(default=None, validator=_softcap)
    """Soft cap on the logits; None for no cap."""

    @property
    def attention_scale(self) -> float:
        """Factor on the attention scores."""
        return 1.0 / math.sqrt(self.query_pre_attn_scalar)

    @property
    def embedding_scale(self) -> float:
        """Factor on the embeddings: √H."""
        return math.sqrt(self.hidden_size)

    @property
    def final_softcap(self) -> float | None:
        """Soft cap on the logits; None for no cap."""
        return self.final_logit_softcapping


@frozen(kw_only=True)
class Gemma2Config(GemmaConfig):
    """Configuration of Gemma 2. By default even layers have the sliding window.

    Raises:
        ConfigError: a size is not a positive integer, or sizes are inconsistent.
    """

    model_type: str = "gemma2"
    final_logit_softcapping: float | None = field(default=30.0, validator=_softcap)
    """Soft cap on the logits; None for no cap."""
    attn_logit_softcapping: float | None = field(default=50.0, validator=_softcap)
    """Soft cap on the attention scores; None for no cap."""

    def window(self, layer: int) -> int | None:
        """Return the attention window of a layer; None for full attention."""
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
    """Return the parallel plan of a Gemma."""
    return plan_with(config, norms=NORMS)


def _block(config: Gemma2Config, layer: int, ops: Ops) -> nn.Module:
    return gemma_block(config, layer, ops, softcap=config.attn_logit_softcapping)


FAMILY = DecoderFamily(
    name="gemma2",
    config=Gemma2Config,
    block=_block,
    norm=UnitOffsetNorm,
    plan=gemma_plan,
    transformers_class="Gemma2ForCausalLM",
    fixed={"mlp_bias": False, "query_key_norm": False},
    null_key_heads=False,
    transformers_defaults={
        "max_position_embeddings": 8192,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    neutral={
        "hidden_act": ("gelu_pytorch_tanh",),  # superseded by `hidden_activation`
        "use_bidirectional_attention": (False, None),
        "cache_implementation": ("hybrid", None),
    },
    activation={"hidden_activation": "gelu_pytorch_tanh"},
    windows=PatternLayers(slides=lambda _, layer: layer % 2 == 0),
    heads_divide_hidden=True,
    small={"tie_word_embeddings": True, "query_pre_attn_scalar": 32, "sliding_window": 1024},
)
