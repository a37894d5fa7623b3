"""Mixtral (Jiang et al., 2024, arXiv:2401.04088): Mistral with experts in every layer."""

from attrs import field, frozen
from torch import nn

from ms_parallel.models.config import size
from ms_parallel.models.decoder import plan_with
from ms_parallel.models.decoder_config import DecoderConfig
from ms_parallel.models.decoder_family import DecoderFamily
from ms_parallel.models.experts.mixture import STYLES, MixtureOfExperts, weight_rules
from ms_parallel.models.experts.router_config import Mixture, RouterConfig
from ms_parallel.models.parts.block import Block
from ms_parallel.models.plan import ModelPlan
from ms_parallel.models.positions.window_format import ALL_LAYERS
from ms_parallel.operators.protocol import Ops
from ms_parallel.settings import number


@frozen(kw_only=True)
class MixtralConfig(DecoderConfig):
    """Configuration of Mixtral; `intermediate_size` is the width of one expert.

    Raises:
        ConfigError: a size is not a positive integer, or sizes are inconsistent.
    """

    num_local_experts: int = field(default=8, validator=size)
    """Number of experts per layer."""
    num_experts_per_tok: int = field(default=2, validator=size)
    """Number of experts per token (top-k)."""
    router_aux_loss_coef: float = field(default=0.001, validator=number())
    """Load-balancing loss coefficient, unless the run sets one."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        _ = self.mixture  # validates the router settings

    @property
    def mixture(self) -> Mixture:
        """Router settings; every layer has experts."""
        choice = RouterConfig(
            num_experts=self.num_local_experts, num_experts_per_tok=self.num_experts_per_tok
        )
        layers = tuple(range(self.num_hidden_layers))
        return Mixture(layers=layers, choice=choice, coefficient=self.router_aux_loss_coef)


def _block(config: MixtralConfig, layer: int, ops: Ops) -> nn.Module:
    choice, hidden = config.mixture.choice, config.hidden_size
    mlp = MixtureOfExperts(choice, hidden, config.intermediate_size, ops)
    return Block(config, layer, ops, mlp=mlp)


def _plan(config: MixtralConfig) -> ModelPlan:
    return plan_with(config, modules=STYLES)


FAMILY = DecoderFamily(
    name="mixtral",
    config=MixtralConfig,
    block=_block,
    plan=_plan,
    weights=lambda _: weight_rules("block_sparse_moe", ("w1", "w3", "w2")),
    transformers_class="MixtralForCausalLM",
    fixed={"attention_bias": False, "mlp_bias": False, "query_key_norm": False},
    aliases={"num_experts": "num_local_experts"},
    null_key_heads=False,
    transformers_defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
    },
    neutral={
        "router_jitter_noise": (0,),
        "output_router_logits": (True, False),  # affects extra outputs only
    },
    windows=ALL_LAYERS,
    null_head_dim=True,
    small={"intermediate_size": 352, "num_local_experts": 8},
)
