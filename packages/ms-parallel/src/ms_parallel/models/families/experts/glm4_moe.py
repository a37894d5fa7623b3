"""GLM-4.5 (GLM-4.5 Team, 2025, arXiv:2508.06471): grouped-query attention, DeepSeek-V3 experts."""

from attrs import field, frozen

from ms_parallel.models.config import above_zero, size
from ms_parallel.models.decoder import plan_with
from ms_parallel.models.decoder_family import DecoderFamily
from ms_parallel.models.experts.deepseek import (
    ALIASES,
    MODULES,
    NEUTRAL,
    DeepseekMoEConfig,
    block,
)
from ms_parallel.models.experts.mixture import weight_rules
from ms_parallel.models.parts.mtp import with_mtp_layers
from ms_parallel.models.plan import ModelPlan
from ms_parallel.models.positions.rope_format import SharedRope
from ms_parallel.settings import flag


@frozen(kw_only=True)
class Glm4MoeConfig(DeepseekMoEConfig):
    """Configuration of GLM-4.5. `query_key_norm` is always `use_qk_norm`.

    Raises:
        ConfigError: a size is not a positive integer, or sizes are inconsistent.
    """

    n_routed_experts: int = field(default=128, validator=size)
    moe_intermediate_size: int = field(default=1408, validator=size)
    partial_rotary_factor: float = field(default=0.5, validator=above_zero)
    """Fraction of the head dims that are rotated, from the first."""
    use_qk_norm: bool = field(default=False, validator=flag)
    """RMS norms over each head of q and k, before rotation."""

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "query_key_norm", self.use_qk_norm)
        super().__attrs_post_init__()

    @property
    def rotary_width(self) -> int:
        """Number of rotated dims per head."""
        return int(self.head_dim * self.partial_rotary_factor)


def _plan(config: Glm4MoeConfig) -> ModelPlan:
    return with_mtp_layers(plan_with(config, modules=MODULES), config)


FAMILY = DecoderFamily(
    name="glm4_moe",
    config=Glm4MoeConfig,
    block=block,
    plan=_plan,
    weights=lambda _: weight_rules(),
    layer_kind=Glm4MoeConfig.has_experts,
    transformers_class="Glm4MoeForCausalLM",
    fixed={"mlp_bias": False},
    aliases=ALIASES,
    null_key_heads=False,
    transformers_defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
    },
    neutral=NEUTRAL,
    positions=SharedRope(partial=True),
    output_bias=False,
    small={
        "use_qk_norm": True,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 176,
    },
)
