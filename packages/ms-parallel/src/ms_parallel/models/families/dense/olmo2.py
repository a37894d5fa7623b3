"""OLMo 2 (OLMo team, 2025, arXiv:2501.00656): norms behind both halves of a layer, not before."""

from attrs import frozen
from torch import Tensor, nn

from ms_parallel.models.decoder import plan_with
from ms_parallel.models.decoder_config import DecoderConfig
from ms_parallel.models.dense import DenseFamily
from ms_parallel.models.parts.attention import Attention
from ms_parallel.models.parts.block import Block, Norms
from ms_parallel.models.parts.norm import WholeWidthNorm
from ms_parallel.models.plan import ModelPlan
from ms_parallel.operators.protocol import Ops

_NORMS = Norms(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm")


@frozen(kw_only=True)
class Olmo2Config(DecoderConfig):
    """An OLMo 2.

    Raises:
        ConfigError: a size is not a whole number of at least 1, or sizes do not fit one another.
    """

    model_type: str = "olmo2"


class WideNormAttention(Attention):
    """Attention with norms over all heads of queries together, and of keys."""

    def __init__(self, config: DecoderConfig, layer: int, ops: Ops) -> None:
        super().__init__(config, layer, ops)
        heads = config.num_attention_heads, config.num_key_value_heads
        widths = (count * config.head_dim for count in heads)
        self.q_norm, self.k_norm = (
            WholeWidthNorm(width, config.rms_norm_eps, ops) for width in widths
        )

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Make queries, keys and values (B, S, heads, D), not turned yet."""
        q, k = self.q_norm(self.q_proj(hidden)), self.k_norm(self.k_proj(hidden))
        made = (q, k, self.v_proj(hidden))
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)) for each in made)
        return q, k, v


def _block(config: Olmo2Config, layer: int, ops: Ops) -> nn.Module:
    attention = WideNormAttention(config, layer, ops)
    return Block(config, layer, ops, attention=attention, norms=_NORMS)


def _plan(config: Olmo2Config) -> ModelPlan:
    wide = {"self_attn.q_norm": "split_width", "self_attn.k_norm": "split_width"}
    return plan_with(config, norms=_NORMS, modules=wide)  # type: ignore[arg-type]


FAMILY = DenseFamily(
    name="olmo2",
    config=Olmo2Config,
    block=_block,
    plan=_plan,
    transformers_class="Olmo2ForCausalLM",
    fixed={"mlp_bias": False, "query_key_norm": False},
    silent={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
)
