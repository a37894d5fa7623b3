"""OLMoE (Muennighoff et al., 2024, arXiv:2409.02060): full-width QK norms, MoE in every layer."""

from attrs import field, frozen
from torch import nn

from ms_parallel.models.config import size
from ms_parallel.models.decoder import plan_with
from ms_parallel.models.decoder_config import DecoderConfig
from ms_parallel.models.decoder_family import DecoderFamily
from ms_parallel.models.experts.mixture import STYLES, MixtureOfExperts, weight_rules
from ms_parallel.models.experts.router_config import Mixture, RouterConfig
from ms_parallel.models.families.dense.olmo2 import WideNormAttention
from ms_parallel.models.parts.block import Block
from ms_parallel.models.plan import ModelPlan
from ms_parallel.operators.protocol import Ops
from ms_parallel.settings import flag, number


@frozen(kw_only=True)
class OlmoeConfig(DecoderConfig):
    """Configuration of OLMoE; `intermediate_size` is the width of one expert.

    Raises:
        ConfigError: a size is not a positive integer, or sizes are inconsistent.
    """

    num_experts: int = field(default=64, validator=size)
    """Number of experts per layer."""
    num_experts_per_tok: int = field(default=8, validator=size)
    """Number of experts per token (top-k)."""
    norm_topk_prob: bool = field(default=False, validator=flag)
    """Normalize the weights of a token's experts to sum to 1."""
    router_aux_loss_coef: float = field(default=0.01, validator=number())
    """Load-balancing loss coefficient, unless the run sets one."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        _ = self.mixture  # validates the router settings

    @property
    def mixture(self) -> Mixture:
        """Router settings; every layer has experts."""
        choice = RouterConfig(
            num_experts=self.num_experts,
            num_experts_per_tok=self.num_experts_per_tok,
            normalized=self.norm_topk_prob,
        )
        layers = tuple(range(self.num_hidden_layers))
        return Mixture(layers=layers, choice=choice, coefficient=self.router_aux_loss_coef)


def _block(config: OlmoeConfig, layer: int, ops: Ops) -> nn.Module:
    choice, hidden = config.mixture.choice, config.hidden_size
    mlp = MixtureOfExperts(choice, hidden, config.intermediate_size, ops)
    attention = WideNormAttention(config, layer, ops)
    return Block(config, layer, ops, attention=attention, mlp=mlp)


def _plan(config: OlmoeConfig) -> ModelPlan:
    wide = {"self_attn.q_norm": "split_width", "self_attn.k_norm": "split_width"}
    return plan_with(config, modules={**STYLES, **wide})  # type: ignore[dict-item]


FAMILY = DecoderFamily(
    name="olmoe",
    config=OlmoeConfig,
    block=_block,
    plan=_plan,
    weights=lambda _: weight_rules(),
    transformers_class="OlmoeForCausalLM",
    fixed={"mlp_bias": False, "query_key_norm": False},
    aliases={"num_local_experts": "num_experts"},
    transformers_defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    neutral={
        "clip_qkv": (None,),
        "output_router_logits": (True, False),  # affects extra outputs only
    },
    heads_divide_hidden=True,
    small={"intermediate_size": 176, "num_experts": 16, "num_experts_per_tok": 4},
)
