"""DeepSeek-V3 mixtures of experts (arXiv:2412.19437), also used by GLM-4.5.

Sigmoid scores, group-limited routing, a selection bias without gradient, shared experts for every
token, and dense first layers.
"""

from math import gcd

from attrs import evolve, field, frozen
from torch import nn

from ms_parallel.cluster.layout import ModelShape
from ms_parallel.errors import ConfigError
from ms_parallel.models.config import above_zero, size
from ms_parallel.models.decoder_config import DecoderConfig
from ms_parallel.models.experts.mixture import STYLES, MixtureOfExperts
from ms_parallel.models.experts.router_config import Mixture, RouterConfig
from ms_parallel.models.parts import mtp
from ms_parallel.models.parts.block import Block
from ms_parallel.models.parts.feed_forward import FeedForward
from ms_parallel.models.plan import Style
from ms_parallel.operators.protocol import Ops
from ms_parallel.settings import flag, integer

ALIASES = {
    "num_local_experts": "n_routed_experts",
    "num_mtp_layers": "num_nextn_predict_layers",
}
"""Alternative config.json keys for the settings below."""
NEUTRAL: dict[str, tuple[object, ...]] = {
    "moe_layer_freq": (1,),
    "ep_size": (1,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "output_router_logits": (True, False),  # affects extra outputs only
}
"""Unused keys of config.json, with the values that match this implementation."""
MODULES: dict[str, Style | None] = {
    **STYLES,
    "mlp.shared_experts.gate_proj": "column",
    "mlp.shared_experts.up_proj": "column",
    "mlp.shared_experts.down_proj": "row",
}
"""Tensor-parallel styles of a layer with experts, by module name in the layer."""


@frozen(kw_only=True)
class DeepseekMoEConfig(DecoderConfig):
    """Decoder with DeepSeek-V3 expert layers; `intermediate_size` is for the dense first layers.

    Raises:
        ConfigError: a size is not a positive integer, or sizes are inconsistent.
    """

    n_routed_experts: int = field(default=256, validator=size)
    """Number of routed experts per layer."""
    num_experts_per_tok: int = field(default=8, validator=size)
    """Number of routed experts per token."""
    n_shared_experts: int = field(default=1, validator=size)
    """Number of shared experts per layer, computed as one wide feed-forward."""
    moe_intermediate_size: int = field(default=2048, validator=size)
    """Width of one expert."""
    n_group: int = field(default=1, validator=size)
    """Number of equal expert groups."""
    topk_group: int = field(default=1, validator=size)
    """Number of groups that a token may use."""
    norm_topk_prob: bool = field(default=True, validator=flag)
    """Normalize the weights of the selected experts to sum to 1."""
    routed_scaling_factor: float = field(default=1.0, validator=above_zero)
    """Scale of the final weights."""
    first_k_dense_replace: int = field(default=1, validator=integer(minimum=0))
    """Number of dense first layers."""
    num_nextn_predict_layers: int = field(default=0, validator=integer(minimum=0, maximum=16))
    """Number of multi-token prediction layers."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        _ = self.mixture  # validates the router settings
        if self.num_nextn_predict_layers and self.tie_word_embeddings:
            raise ConfigError(
                f"num_nextn_predict_layers={self.num_nextn_predict_layers} needs an untied output"
                " head; set tie_word_embeddings=false"
            )

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return layer >= self.first_k_dense_replace

    @property
    def mixture(self) -> Mixture:
        """Mixture-of-experts settings of the model."""
        choice = RouterConfig(
            num_experts=self.n_routed_experts,
            num_experts_per_tok=self.num_experts_per_tok,
            scores="sigmoid",
            normalized=self.norm_topk_prob,
            factor=self.routed_scaling_factor,
            groups=self.n_group,
            topk_groups=self.topk_group,
            corrected=True,
        )
        # MTP layers are routed as well.
        layers = range(self.num_hidden_layers + self.num_nextn_predict_layers)
        return Mixture(layers=tuple(filter(self.has_experts, layers)), choice=choice)

    @property
    def mtp_layers(self) -> int:
        """Number of multi-token prediction layers."""
        return self.num_nextn_predict_layers

    @property
    def shape(self) -> ModelShape:
        """Sizes that a parallel layout must divide, expert widths included."""
        dense = super().shape
        widths = {self.moe_intermediate_size, dense.intermediate_size}
        return evolve(dense, intermediate_size=gcd(*widths))


def block(
    config: DeepseekMoEConfig, layer: int, ops: Ops, *, attention: nn.Module | None = None
) -> nn.Module:
    """Build a layer with experts, or with a dense feed-forward for the first layers.

    Args:
        config: Model configuration.
        layer: Layer index; MTP layers count on from the model's layers.
        ops: Operators.
        attention: Attention module for `Block`.
    """
    block_class = Block if layer < config.num_hidden_layers else mtp.MTPLayer
    mlp: nn.Module = FeedForward(config, ops)
    if config.has_experts(layer):
        inner, choice = config.moe_intermediate_size, config.mixture.choice
        shared = FeedForward(config, ops, inner=inner * config.n_shared_experts)
        mlp = MixtureOfExperts(choice, config.hidden_size, inner, ops, shared=shared)
    return block_class(config, layer, ops, attention=attention, mlp=mlp)
