"""OLMo 2 (OLMo Team, 2025, arXiv:2501.00656): norms after attention and mlp instead of before."""

from attrs import frozen
from torch import Tensor, nn

from ms_parallel.models.decoder import plan_with
from ms_parallel.models.decoder_config import DecoderConfig
from ms_parallel.models.decoder_family import DecoderFamily
from ms_parallel.models.parts.attention import Attention
from ms_parallel.models.parts.block import Block, Norms
from ms_parallel.models.parts.norm import FullWidthNorm
from ms_parallel.models.plan import ModelPlan
from ms_parallel.operators.protocol import Ops

_NORMS = Norms(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm")


@frozen(kw_only=True)
class Olmo2Config(DecoderConfig):
    """Configuration of OLMo 2.

    Raises:
        ConfigError: a size is not a positive integer, or sizes are inconsistent.
    """

    model_type: str = "olmo2"


class WideNormAttention(Attention):
    """Attention with query and key norms over the full width instead of per head."""

    def __init__(self, config: DecoderConfig, layer: int, ops: Ops) -> None:
        super().__init__(config, layer, ops)
        heads = config.num_attention_heads, config.num_key_value_heads
        widths = (count * config.head_dim for count in heads)
        self.q_norm, self.k_norm = (
            FullWidthNorm(width, config.rms_norm_eps, ops) for width in widths
        )

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project to queries, keys and values (B, S, heads, D), before rotation."""
        q, k = self.q_norm(self.q_proj(hidden)), self.k_norm(self.k_proj(hidden))
        qkv = (q, k, self.v_proj(hidden))
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in qkv)
        return q, k, v


def _block(config: Olmo2Config, layer: int, ops: Ops) -> nn.Module:
    attention = WideNormAttention(config, layer, ops)
    return Block(config, layer, ops, attention=attention, norms=_NORMS)


def _plan(config: Olmo2Config) -> ModelPlan:
    wide = {"self_attn.q_norm": "split_width", "self_attn.k_norm": "split_width"}
    return plan_with(config, norms=_NORMS, modules=wide)  # type: ignore[arg-type]


FAMILY = DecoderFamily(
    name="olmo2",
    config=Olmo2Config,
    block=_block,
    plan=_plan,
    transformers_class="Olmo2ForCausalLM",
    fixed={"mlp_bias": False, "query_key_norm": False},
    transformers_defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
)
