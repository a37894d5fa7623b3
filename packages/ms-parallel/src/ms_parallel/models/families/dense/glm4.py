"""GLM-4-0414 (GLM Team, 2025): interleaved rotation of half of each head, four norms per layer."""

from attrs import field, frozen
from torch import nn

from ms_parallel.models.decoder import plan_with
from ms_parallel.models.decoder_config import DecoderConfig
from ms_parallel.models.decoder_family import DecoderFamily
from ms_parallel.models.parts.block import Block, Norms
from ms_parallel.models.plan import ModelPlan
from ms_parallel.models.positions.rope_format import SharedRope
from ms_parallel.models.weight_names import WeightRules, rows_of
from ms_parallel.operators.protocol import Ops
from ms_parallel.settings import number

_NORMS = Norms(
    before_attention="input_layernorm",
    after_attention="post_self_attn_layernorm",
    before_mlp="post_attention_layernorm",
    after_mlp="post_mlp_layernorm",
)


@frozen(kw_only=True)
class Glm4Config(DecoderConfig):
    """Configuration of GLM-4-0414.

    Raises:
        ConfigError: a size is not a positive integer, or sizes are inconsistent.
    """

    model_type: str = "glm4"
    partial_rotary_factor: float = field(default=0.5, validator=number(minimum=1e-3, maximum=1.0))
    """Fraction of the head dims that are rotated."""

    @property
    def rotary_width(self) -> int:
        """Number of rotated dims per head."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def rotary_interleaved(self) -> bool:
        """Rotation pairs adjacent dims."""
        return True


def fused_gate_up_rules(config: DecoderConfig) -> WeightRules:
    """Return the weight rules for checkpoints that fuse gate and up into one matrix."""
    fused, inner = "model.layers.{0}.mlp.gate_up_proj.weight", config.intermediate_size
    return {
        "model.layers.*.mlp.gate_proj.weight": rows_of(fused, 0, 2 * inner),
        "model.layers.*.mlp.up_proj.weight": rows_of(fused, inner, 2 * inner),
    }


def _block(config: Glm4Config, layer: int, ops: Ops) -> nn.Module:
    return Block(config, layer, ops, norms=_NORMS)


def _plan(config: Glm4Config) -> ModelPlan:
    return plan_with(config, norms=_NORMS)


FAMILY = DecoderFamily(
    name="glm4",
    config=Glm4Config,
    block=_block,
    plan=_plan,
    weights=fused_gate_up_rules,
    transformers_class="Glm4ForCausalLM",
    fixed={"mlp_bias": False, "query_key_norm": False},
    null_key_heads=False,
    transformers_defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-7,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    positions=SharedRope(partial=True),
    output_bias=False,
    small={"attention_bias": True},
)
