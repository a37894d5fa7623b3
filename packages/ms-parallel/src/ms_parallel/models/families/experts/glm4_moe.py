"""GLM-4.5 (GLM-4.5 Team, 2025, arXiv:2508.06471): grouped heads, DeepSeek's mixtures of experts."""

from attrs import field, frozen

from ms_parallel.models.config import above_zero, size
from ms_parallel.models.decoder import plan_with
from ms_parallel.models.dense import DenseFamily
from ms_parallel.models.experts.corrected import (
    ALSO_CALLED,
    MODULES,
    NEUTRAL,
    CorrectedConfig,
    block,
)
from ms_parallel.models.experts.mixture import weight_rules
from ms_parallel.models.parts.mtp import with_mtp_layers
from ms_parallel.models.plan import ModelPlan
from ms_parallel.models.positions.document import OneRope
from ms_parallel.settings import flag


@frozen(kw_only=True)
class Glm4MoeConfig(CorrectedConfig):
    """A GLM-4.5; `query_key_norm` follows from `use_qk_norm`.

    Raises:
        ConfigError: a size is not a whole number of at least 1, or sizes do not fit one another.
    """

    n_routed_experts: int = field(default=128, validator=size)
    moe_intermediate_size: int = field(default=1408, validator=size)
    partial_rotary_factor: float = field(default=0.5, validator=above_zero)
    """What share of a head turns: its first dims."""
    use_qk_norm: bool = field(default=False, validator=flag)
    """RMS norms over each head of q and k, before rotation."""

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "query_key_norm", self.use_qk_norm)
        super().__attrs_post_init__()

    @property
    def rotary_width(self) -> int:
        """Dims of a head that turn."""
        return int(self.head_dim * self.partial_rotary_factor)


def _plan(config: Glm4MoeConfig) -> ModelPlan:
    return with_mtp_layers(plan_with(config, modules=MODULES), config)


FAMILY = DenseFamily(
    name="glm4_moe",
    config=Glm4MoeConfig,
    block=block,
    plan=_plan,
    weights=lambda _: weight_rules(),
    layer_kind=Glm4MoeConfig.has_experts,
    transformers_class="Glm4MoeForCausalLM",
    fixed={"mlp_bias": False},
    also_called=ALSO_CALLED,
    null_key_heads=False,
    silent={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
    },
    neutral=NEUTRAL,
    positions=OneRope(partial=True),
    output_bias=False,
    small={
        "use_qk_norm": True,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 176,
    },
)
