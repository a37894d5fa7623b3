"""gpt-oss (OpenAI, 2025, arXiv:2508.10925): sinks, alternating windows, experts with biases."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor, nn

from ms_parallel.errors import ModelError
from ms_parallel.models.config import above_zero, size
from ms_parallel.models.decoder import plan_with
from ms_parallel.models.decoder_config import DecoderConfig
from ms_parallel.models.dense import DenseFamily
from ms_parallel.models.experts.choice import Choice, Mixture
from ms_parallel.models.experts.mixture import STYLES, MixtureOfExperts
from ms_parallel.models.parts.attention import Attention
from ms_parallel.models.parts.block import Block
from ms_parallel.models.plan import ModelPlan
from ms_parallel.models.positions.document import ONE_ROPE
from ms_parallel.models.positions.windows import Sliding, layer_types, sliding_layers
from ms_parallel.models.weight_names import Rules, WeightSlice, renamed
from ms_parallel.operators.protocol import Ops
from ms_parallel.settings import number


@frozen(kw_only=True)
class GptOssConfig(DecoderConfig):
    """A gpt-oss; `intermediate_size` is the width of one expert.

    Raises:
        ConfigError: a size is not a whole number of at least 1, or sizes do not fit one another.
    """

    num_local_experts: int = field(default=128, validator=size)
    """Experts of a layer."""
    num_experts_per_tok: int = field(default=4, validator=size)
    """How many each token chooses."""
    router_aux_loss_coef: float = field(default=0.001, validator=number())
    """Weight of the balance loss, unless the run sets one."""
    swiglu_alpha: float = field(default=1.702, validator=above_zero)
    """How steep an expert's gate is."""
    swiglu_limit: float = field(default=7.0, validator=above_zero)
    """What an expert's gate is clamped to from above, and what it gates from both sides."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        _ = self.mixture  # which refuses what does not fit

    @property
    def mixture(self) -> Mixture:
        """Experts in every layer."""
        choice = Choice(
            num_experts=self.num_local_experts,
            num_experts_per_tok=self.num_experts_per_tok,
            scores="softmax_of_chosen",
            bias=True,
        )
        layers = tuple(range(self.num_hidden_layers))
        return Mixture(layers=layers, choice=choice, coefficient=self.router_aux_loss_coef)


def _block(config: GptOssConfig, layer: int, ops: Ops) -> nn.Module:
    alpha, limit = config.swiglu_alpha, config.swiglu_limit

    def gate(gate: Tensor, up: Tensor) -> Tensor:
        gate = gate.clamp(max=limit)
        return (up.clamp(-limit, limit) + 1) * gate * torch.sigmoid(alpha * gate)

    choice, hidden, inner = config.mixture.choice, config.hidden_size, config.intermediate_size
    mlp = MixtureOfExperts(choice, hidden, inner, ops, gate=gate, bias=True)
    attention = Attention(config, layer, ops, sinks=True)
    return Block(config, layer, ops, attention=attention, mlp=mlp)


def _plan(config: GptOssConfig) -> ModelPlan:
    return plan_with(config, modules={**STYLES, "self_attn.sinks": "split_heads"})


def _weights(config: GptOssConfig) -> Rules:
    """Return the rules: all experts in one tensor, transposed, gate and up alternating."""
    experts = "mlp.experts.{}"

    def alternating(stars: tuple[str, ...], shape: tuple[int, ...]) -> Iterator[WeightSlice]:
        count, several, inner, *inputs = shape
        name = f"model.layers.{stars[0]}.mlp.experts.gate_up_proj" + ("" if inputs else "_bias")
        every = [slice(0, size) for size in (count, *inputs)]
        for which in range(several):
            yield WeightSlice(
                tensor=name,
                shape=(count, *inputs, several * inner),
                part=(*every, slice(which, several * inner, several)),
                box=(every[0], slice(which, which + 1), slice(0, inner), *every[1:]),
                dims=(0, None, 2, 1) if inputs else (0, None, 1),
            )

    def transposed(stars: tuple[str, ...], shape: tuple[int, ...]) -> Iterator[WeightSlice]:
        count, outputs, inputs = (slice(0, size) for size in shape)
        yield WeightSlice(
            tensor=f"model.layers.{stars[0]}.mlp.experts.down_proj",
            shape=(shape[0], shape[2], shape[1]),
            part=(count, inputs, outputs),
            box=(count, outputs, inputs),
            dims=(0, 2, 1),
        )

    layer, here = "model.layers.*.", "model.layers.{0}."
    return {
        f"{layer}{experts.format('gate_up_proj')}.*": alternating,
        f"{layer}{experts.format('down_proj')}.weight": transposed,
        f"{layer}{experts.format('down_proj')}.bias": renamed(f"{here}mlp.experts.down_proj_bias"),
        f"{layer}mlp.gate.*": renamed(f"{here}mlp.router.{{1}}"),
        f"{layer}self_attn.sinks.bias": renamed(f"{here}self_attn.sinks"),
    }


_WINDOW = 128


class _Windows:
    """Every other layer slides, the first one too, where `layer_types` says nothing."""

    keys = frozenset({"sliding_window", "layer_types"})

    def read(self, config_json: Mapping[str, Any]) -> Sliding:
        """Read the window and the layers that slide."""
        window, kinds = config_json.get("sliding_window"), config_json.get("layer_types")
        count = config_json["num_hidden_layers"]
        layers = tuple(range(0, count, 2)) if kinds is None else sliding_layers(kinds, count)
        if layers and window is None:
            raise ModelError(
                "layers slide, but there is no sliding_window; give one, or full_attention for"
                " each layer in layer_types"
            )
        return (window, layers) if layers else (None, None)

    def write(self, config: GptOssConfig) -> dict[str, object]:
        """Return both, a window even if no layer slides: transformers does not run without one."""
        window = config.sliding_window or _WINDOW
        return {"sliding_window": window, "layer_types": layer_types(config)}


class _Positions:
    """Stretched by YaRN where config.json says nothing."""

    keys: frozenset[str] = frozenset()

    def read(self, config_json: Mapping[str, Any]) -> dict[str, Any]:
        """Read base and scaling."""
        if config_json.get("rope_parameters") is None and not config_json.get("rope_scaling"):
            yarn = {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
            config_json = {**config_json, "rope_scaling": {"rope_type": "yarn", **yarn}}
        return ONE_ROPE.read(config_json)

    def write(self, config: GptOssConfig) -> dict[str, object]:
        """Return the old spelling of positions; where nothing is scaled, say so outright."""
        found = ONE_ROPE.write(config)
        return found | {"rope_scaling": found["rope_scaling"] or {"rope_type": "default"}}


FAMILY = DenseFamily(
    name="gpt_oss",
    config=GptOssConfig,
    block=_block,
    plan=_plan,
    weights=_weights,
    transformers_class="GptOssForCausalLM",
    fixed={"mlp_bias": False, "query_key_norm": False},
    also_called={"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
    null_key_heads=False,
    silent={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "sliding_window": _WINDOW,
        "attention_bias": True,
    },
    neutral={
        "output_router_logits": (True, False),  # what is returned beside the logits
        "initial_context_length": (4096, None),  # said again by its scaling
    },
    positions=_Positions(),
    windows=_Windows(),
    small={
        "intermediate_size": 352,
        "attention_bias": True,
        "sliding_window": _WINDOW,
        "sliding_layers": (0, 2, 4),
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
)
