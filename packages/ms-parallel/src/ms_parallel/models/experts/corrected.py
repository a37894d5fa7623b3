"""Mixtures of DeepSeek-V3's kind (arXiv:2412.19437), which GLM-4.5 has too.

Scores are sigmoids, groups of experts are chosen before experts, a bias that no gradient trains
corrects the choice, every token passes shared experts besides, and the first layers have none.
"""

from math import gcd

from attrs import evolve, field, frozen
from torch import nn

from ms_parallel.cluster.layout import ModelShape
from ms_parallel.errors import ConfigError
from ms_parallel.models.config import above_zero, size
from ms_parallel.models.decoder_config import DecoderConfig
from ms_parallel.models.experts.choice import Choice, Mixture
from ms_parallel.models.experts.mixture import STYLES, MixtureOfExperts
from ms_parallel.models.parts import mtp
from ms_parallel.models.parts.block import Block
from ms_parallel.models.parts.feed_forward import FeedForward
from ms_parallel.models.plan import Style
from ms_parallel.operators.protocol import Ops
from ms_parallel.settings import flag, whole

ALSO_CALLED = {
    "num_local_experts": "n_routed_experts",
    "num_mtp_layers": "num_nextn_predict_layers",
}
"""Other keys of config.json for settings below."""
NEUTRAL: dict[str, tuple[object, ...]] = {
    "moe_layer_freq": (1,),
    "ep_size": (1,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "output_router_logits": (True, False),  # what is returned beside the logits
}
"""Keys of config.json that are not read, with the values that mean what is built here."""
MODULES: dict[str, Style | None] = {
    **STYLES,
    "mlp.shared_experts.gate_proj": "column",
    "mlp.shared_experts.up_proj": "column",
    "mlp.shared_experts.down_proj": "row",
}
"""How the tensor axis splits a layer's mixture, by the names of modules in it, and what a layer
that predicts further has besides."""


@frozen(kw_only=True)
class CorrectedConfig(DecoderConfig):
    """A decoder with such mixtures; `intermediate_size` is that of the first layers.

    Raises:
        ConfigError: a size is not a whole number of at least 1, or sizes do not fit one another.
    """

    n_routed_experts: int = field(default=256, validator=size)
    """Experts of a layer that tokens choose from."""
    num_experts_per_tok: int = field(default=8, validator=size)
    """How many each token chooses."""
    n_shared_experts: int = field(default=1, validator=size)
    """Experts of a layer that all tokens pass, as one feed-forward as wide as all."""
    moe_intermediate_size: int = field(default=2048, validator=size)
    """Width of one expert."""
    n_group: int = field(default=1, validator=size)
    """Equal groups of experts."""
    topk_group: int = field(default=1, validator=size)
    """How many groups are left to choose from."""
    norm_topk_prob: bool = field(default=True, validator=flag)
    """The weights of the chosen are divided by their sum."""
    routed_scaling_factor: float = field(default=1.0, validator=above_zero)
    """What the weights are multiplied by in the end."""
    first_k_dense_replace: int = field(default=1, validator=whole(least=0))
    """So many first layers have no experts."""
    num_nextn_predict_layers: int = field(default=0, validator=whole(least=0, most=16))
    """Layers behind the last one, each of which predicts one token further."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        _ = self.mixture  # which refuses what does not fit
        if self.num_nextn_predict_layers and self.tie_word_embeddings:
            raise ConfigError(
                f"num_nextn_predict_layers={self.num_nextn_predict_layers} needs a head of its own;"
                " set tie_word_embeddings to false"
            )

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has experts."""
        return layer >= self.first_k_dense_replace

    @property
    def mixture(self) -> Mixture:
        """Experts in the layers that have them."""
        choice = Choice(
            num_experts=self.n_routed_experts,
            num_experts_per_tok=self.num_experts_per_tok,
            scores="sigmoid",
            normalized=self.norm_topk_prob,
            factor=self.routed_scaling_factor,
            groups=self.n_group,
            chosen_groups=self.topk_group,
            corrected=True,
        )
        layers = range(self.num_hidden_layers + self.num_nextn_predict_layers)
        return Mixture(layers=tuple(filter(self.has_experts, layers)), choice=choice)

    @property
    def mtp_layers(self) -> int:
        """Layers behind the last one, each of which predicts one token further."""
        return self.num_nextn_predict_layers

    @property
    def shape(self) -> ModelShape:
        """The sizes that a layout has to divide, those of experts among them."""
        own = super().shape
        widths = {self.moe_intermediate_size, own.intermediate_size}
        return evolve(own, intermediate_size=gcd(*widths))


def block(
    config: CorrectedConfig, layer: int, ops: Ops, *, attention: nn.Module | None = None
) -> nn.Module:
    """Build a layer: with a mixture, or with a plain feed-forward in the first ones.

    Args:
        config: The model.
        layer: Its number; from the number of the model's layers on it predicts further.
        ops: Operators.
        attention: As `Block` takes it.
    """
    kind = Block if layer < config.num_hidden_layers else mtp.MTPLayer
    mlp: nn.Module = FeedForward(config, ops)
    if config.has_experts(layer):
        inner, choice = config.moe_intermediate_size, config.mixture.choice
        shared = FeedForward(config, ops, inner=inner * config.n_shared_experts)
        mlp = MixtureOfExperts(choice, config.hidden_size, inner, ops, shared=shared)
    return kind(config, layer, ops, attention=attention, mlp=mlp)
