"""Qwen3-MoE (Yang et al., 2025, arXiv:2505.09388)."""

from collections.abc import Mapping
from math import gcd
from typing import Any

from attrs import evolve, field, frozen
from torch import nn

from ms_parallel.cluster.layout import ModelShape
from ms_parallel.errors import ConfigError, ModelError
from ms_parallel.models.config import size
from ms_parallel.models.decoder import plan_with
from ms_parallel.models.decoder_config import DecoderConfig
from ms_parallel.models.decoder_family import DecoderFamily
from ms_parallel.models.experts.mixture import STYLES, MixtureOfExperts, weight_rules
from ms_parallel.models.experts.router_config import Mixture, RouterConfig
from ms_parallel.models.parts.block import Block
from ms_parallel.models.plan import ModelPlan
from ms_parallel.models.positions.window_format import WindowSettings
from ms_parallel.operators.protocol import Ops
from ms_parallel.settings import flag, number


def _layers(value: Any) -> tuple[int, ...]:
    """Convert a list of layer indices to a tuple; null means no layers."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or any(type(layer) is not int for layer in value):
        raise ConfigError(
            f"mlp_only_layers must be a list of layer indices, got {str(value)[:60]!r}"
        )
    return tuple(value)


@frozen(kw_only=True)
class Qwen3MoeConfig(DecoderConfig):
    """Configuration of Qwen3-MoE; `intermediate_size` is the width of dense layers.

    Raises:
        ConfigError: a size is not a positive integer, or sizes are inconsistent.
    """

    num_experts: int = field(default=128, validator=size)
    """Number of experts per layer."""
    num_experts_per_tok: int = field(default=8, validator=size)
    """Number of experts per token (top-k)."""
    moe_intermediate_size: int = field(default=768, validator=size)
    """Hidden width of an expert."""
    norm_topk_prob: bool = field(default=False, validator=flag)
    """Normalize the weights of a token's experts to sum to 1."""
    decoder_sparse_step: int = field(default=1, validator=size)
    """Every N-th layer has experts."""
    mlp_only_layers: tuple[int, ...] = field(default=(), converter=_layers)
    """Indices of dense layers."""
    router_aux_loss_coef: float = field(default=0.001, validator=number())
    """Load-balancing loss coefficient, unless the run sets its own."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        _ = self.mixture  # validates the expert settings

    def has_experts(self, layer: int) -> bool:
        """Whether a layer is a mixture of experts."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0

    @property
    def mixture(self) -> Mixture:
        """Expert settings and the layers they apply to."""
        choice = RouterConfig(
            num_experts=self.num_experts,
            num_experts_per_tok=self.num_experts_per_tok,
            normalized=self.norm_topk_prob,
        )
        layers = tuple(filter(self.has_experts, range(self.num_hidden_layers)))
        return Mixture(layers=layers, choice=choice, coefficient=self.router_aux_loss_coef)

    @property
    def shape(self) -> ModelShape:
        """Sizes that a layout must divide, including the experts' width."""
        shape = super().shape
        widths = {self.moe_intermediate_size if self.mixture.layers else shape.intermediate_size}
        # Dense layers are split as well.
        if len(self.mixture.layers) < self.num_hidden_layers:
            widths.add(self.intermediate_size)
        return evolve(shape, intermediate_size=gcd(*widths))


def _block(config: Qwen3MoeConfig, layer: int, ops: Ops) -> nn.Module:
    if not config.has_experts(layer):
        return Block(config, layer, ops)
    choice, hidden = config.mixture.choice, config.hidden_size
    mlp = MixtureOfExperts(choice, hidden, config.moe_intermediate_size, ops)
    return Block(config, layer, ops, mlp=mlp)


def _plan(config: Qwen3MoeConfig) -> ModelPlan:
    return plan_with(config, modules=STYLES)


class _AllOrNone:
    """Sliding window of all layers or none; like transformers, it ignores `max_window_layers`."""

    keys = frozenset({"sliding_window", "use_sliding_window", "max_window_layers"})

    def read(self, config_json: Mapping[str, Any]) -> WindowSettings:
        """Read the window size if `use_sliding_window` is true."""
        enabled = config_json.get("use_sliding_window", False)
        if type(enabled) is not bool:
            raise ModelError(f"use_sliding_window must be true or false, got {repr(enabled)[:60]}")
        return (config_json.get("sliding_window", 4096) if enabled else None), None

    def write(self, config: DecoderConfig) -> dict[str, object]:
        """Return the keys of config.json for the window."""
        enabled = config.sliding_window is not None
        return {"use_sliding_window": enabled, "sliding_window": config.sliding_window}


FAMILY = DecoderFamily(
    name="qwen3_moe",
    config=Qwen3MoeConfig,
    block=_block,
    plan=_plan,
    weights=lambda _: weight_rules(),
    layer_kind=Qwen3MoeConfig.has_experts,
    transformers_class="Qwen3MoeForCausalLM",
    fixed={"mlp_bias": False, "query_key_norm": True},
    aliases={"num_local_experts": "num_experts"},
    null_key_heads=False,
    transformers_defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
    },
    neutral={"output_router_logits": (True, False)},  # affects only extra outputs
    windows=_AllOrNone(),
    small={
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 176,
        "norm_topk_prob": True,
    },
)
