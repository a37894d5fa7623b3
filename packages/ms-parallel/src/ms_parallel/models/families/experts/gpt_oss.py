"""gpt-oss (OpenAI, 2025, arXiv:2508.10925): attention sinks, interleaved windows, expert biases."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor, nn

from ms_parallel.errors import ModelError
from ms_parallel.models.config import above_zero, size
from ms_parallel.models.decoder import plan_with
from ms_parallel.models.decoder_config import DecoderConfig
from ms_parallel.models.decoder_family import DecoderFamily
from ms_parallel.models.experts.mixture import STYLES, MixtureOfExperts
from ms_parallel.models.experts.router_config import Mixture, RouterConfig
from ms_parallel.models.parts.attention import Attention
from ms_parallel.models.parts.block import Block
from ms_parallel.models.plan import ModelPlan
from ms_parallel.models.positions.rope_format import SHARED_ROPE
from ms_parallel.models.positions.window_format import WindowSettings, layer_types, sliding_layers
from ms_parallel.models.weight_names import WeightRules, WeightSlice, renamed
from ms_parallel.operators.protocol import Ops
from ms_parallel.settings import number


@frozen(kw_only=True)
class GptOssConfig(DecoderConfig):
    """Configuration of gpt-oss; `intermediate_size` is the width of one expert.

    Raises:
        ConfigError: a size is not a positive integer, or sizes are inconsistent.
    """

    num_local_experts: int = field(default=128, validator=size)
    """Number of experts per layer."""
    num_experts_per_tok: int = field(default=4, validator=size)
    """Number of experts per token (top-k)."""
    router_aux_loss_coef: float = field(default=0.001, validator=number())
    """Load-balancing loss coefficient, unless the run sets one."""
    swiglu_alpha: float = field(default=1.702, validator=above_zero)
    """Factor in the sigmoid of an expert's gate."""
    swiglu_limit: float = field(default=7.0, validator=above_zero)
    """Upper clamp of an expert's gate, and symmetric clamp of its up projection."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        _ = self.mixture  # validates the router settings

    @property
    def mixture(self) -> Mixture:
        """Router settings; every layer has experts."""
        choice = RouterConfig(
            num_experts=self.num_local_experts,
            num_experts_per_tok=self.num_experts_per_tok,
            scores="softmax_of_topk",
            bias=True,
        )
        layers = tuple(range(self.num_hidden_layers))
        return Mixture(layers=layers, choice=choice, coefficient=self.router_aux_loss_coef)


def _block(config: GptOssConfig, layer: int, ops: Ops) -> nn.Module:
    alpha, limit = config.swiglu_alpha, config.swiglu_limit

    def gate(gate: Tensor, up: Tensor) -> Tensor:
        # Differs from SwiGLU by the clamps, the factor in the sigmoid, and up + 1.
        gate = gate.clamp(max=limit)
        return (up.clamp(-limit, limit) + 1) * gate * torch.sigmoid(alpha * gate)

    choice, hidden, inner = config.mixture.choice, config.hidden_size, config.intermediate_size
    mlp = MixtureOfExperts(choice, hidden, inner, ops, gate=gate, bias=True)
    mlp.experts.gate_up_proj.interleaved = True
    attention = Attention(config, layer, ops, sinks=True)
    return Block(config, layer, ops, attention=attention, mlp=mlp)


def _plan(config: GptOssConfig) -> ModelPlan:
    return plan_with(config, modules={**STYLES, "self_attn.sinks": "split_heads"})


def _weights(config: GptOssConfig) -> WeightRules:
    """Return the weight rules: experts in one tensor, transposed, gate and up interleaved."""
    experts = "mlp.experts.{}"

    def interleaved(wildcards: tuple[str, ...], shape: tuple[int, ...]) -> Iterator[WeightSlice]:
        # Parameter (E, 2, I, H) or bias (E, 2, I); tensor (E, H, 2·I) or (E, 2·I).
        count, matrices, inner, *inputs = shape
        name = f"model.layers.{wildcards[0]}.mlp.experts.gate_up_proj" + ("" if inputs else "_bias")
        full = [slice(0, size) for size in (count, *inputs)]
        # In the tensor's last dim gate has the even indices, up the odd ones.
        for matrix in range(matrices):
            yield WeightSlice(
                tensor=name,
                shape=(count, *inputs, matrices * inner),
                part=(*full, slice(matrix, matrices * inner, matrices)),
                box=(full[0], slice(matrix, matrix + 1), slice(0, inner), *full[1:]),
                dims=(0, None, 2, 1) if inputs else (0, None, 1),
            )

    def transposed(wildcards: tuple[str, ...], shape: tuple[int, ...]) -> Iterator[WeightSlice]:
        # Parameter (E, H, I); tensor (E, I, H).
        count, outputs, inputs = (slice(0, size) for size in shape)
        yield WeightSlice(
            tensor=f"model.layers.{wildcards[0]}.mlp.experts.down_proj",
            shape=(shape[0], shape[2], shape[1]),
            part=(count, inputs, outputs),
            box=(count, outputs, inputs),
            dims=(0, 2, 1),
        )

    layer, disk = "model.layers.*.", "model.layers.{0}."
    return {
        f"{layer}{experts.format('gate_up_proj')}.*": interleaved,
        f"{layer}{experts.format('down_proj')}.weight": transposed,
        f"{layer}{experts.format('down_proj')}.bias": renamed(f"{disk}mlp.experts.down_proj_bias"),
        f"{layer}mlp.gate.*": renamed(f"{disk}mlp.router.{{1}}"),
        f"{layer}self_attn.sinks.bias": renamed(f"{disk}self_attn.sinks"),
    }


_WINDOW = 128


class _EvenLayers:
    """Sliding window in even layers, unless `layer_types` is set."""

    keys = frozenset({"sliding_window", "layer_types"})

    def read(self, config_json: Mapping[str, Any]) -> WindowSettings:
        """Read the window and its layers."""
        window, kinds = config_json.get("sliding_window"), config_json.get("layer_types")
        count = config_json["num_hidden_layers"]
        layers = tuple(range(0, count, 2)) if kinds is None else sliding_layers(kinds, count)
        if layers and window is None:
            raise ModelError(
                "layers with sliding attention need a sliding_window; add it, or use full_attention"
                " in all layer_types"
            )
        return (window, layers) if layers else (None, None)

    def write(self, config: GptOssConfig) -> dict[str, object]:
        """Return the window and `layer_types`; transformers needs a window even if unused."""
        window = config.sliding_window or _WINDOW
        return {"sliding_window": window, "layer_types": layer_types(config)}


class _YarnByDefault:
    """Llama's format, with YaRN scaling by default."""

    keys: frozenset[str] = frozenset()

    def read(self, config_json: Mapping[str, Any]) -> dict[str, Any]:
        """Read base and scaling."""
        if config_json.get("rope_parameters") is None and not config_json.get("rope_scaling"):
            yarn = {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
            config_json = {**config_json, "rope_scaling": {"rope_type": "yarn", **yarn}}
        return SHARED_ROPE.read(config_json)

    def write(self, config: GptOssConfig) -> dict[str, object]:
        """Return the settings in the old format; without scaling, an explicit default type."""
        settings = SHARED_ROPE.write(config)
        return settings | {"rope_scaling": settings["rope_scaling"] or {"rope_type": "default"}}


FAMILY = DecoderFamily(
    name="gpt_oss",
    config=GptOssConfig,
    block=_block,
    plan=_plan,
    weights=_weights,
    transformers_class="GptOssForCausalLM",
    fixed={"mlp_bias": False, "query_key_norm": False},
    aliases={"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
    null_key_heads=False,
    transformers_defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "sliding_window": _WINDOW,
        "attention_bias": True,
    },
    neutral={
        "output_router_logits": (True, False),  # affects extra outputs only
        "initial_context_length": (4096, None),  # repeated in rope_scaling
    },
    positions=_YarnByDefault(),
    windows=_EvenLayers(),
    small={
        "intermediate_size": 352,
        "attention_bias": True,
        "sliding_window": _WINDOW,
        "sliding_layers": (0, 2, 4),
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
)
