"""Latent attention, DeepSeek's experts and gpt-oss against transformers and against plain loops.

Model folders are saved by transformers from tiny random models. The plain loops follow the papers,
compute in float64 and read the tensors of a folder by name.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from processes import run_processes
from runs import FAMILIES
from safetensors.torch import load_file, save_file
from torch import Tensor

from ms_parallel.errors import ParallelError
from ms_parallel.models.cache import KeyValueCache
from ms_parallel.models.registry import from_document
from ms_parallel.models.staged import StagedModel
from ms_parallel.weights import load_model, save_model

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

SPLITS = Path(__file__).parent / "splits.py"
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
    "max_position_embeddings": 128,
}
EXPERTS = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "num_mtp_layers": 0,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
}
PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
CASES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        **LATENT,
        **EXPERTS,
        "q_lora_rank": 12,
        "v_head_dim": 8,
        "n_group": 4,
        "topk_group": 2,
    },
    "deepseek_v3-yarn": {
        **LATENT,
        **EXPERTS,
        "q_lora_rank": None,
        "v_head_dim": 14,
        "n_group": 2,
        "topk_group": 1,
        "rms_norm_eps": 1e-3,
        "attention_bias": True,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
    },
    "deepseek_v3-halves": {
        **LATENT,
        **EXPERTS,
        "q_lora_rank": 12,
        "v_head_dim": 10,
        "rope_interleave": False,
        "norm_topk_prob": False,
        "n_group": 1,
        "topk_group": 1,
    },
    "glm4_moe": {
        **EXPERTS,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "use_qk_norm": True,
        "attention_bias": True,
        "routed_scaling_factor": 1.5,
        "n_shared_experts": 2,
    },
    "glm4_moe-plain": {**EXPERTS, "num_key_value_heads": 4, "head_dim": 8},
    "gpt_oss": {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 5,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "swiglu_limit": 0.5,
        **PLAIN,
    },
    "gpt_oss-yarn": {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 3,
        "num_local_experts": 4,
        "num_experts_per_tok": 4,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "rope_parameters": {**YARN, "truncate": False},
    },
}
ONE_PER_FAMILY = ("deepseek_v3", "glm4_moe", "gpt_oss")
TOLERANCE = 1e-4
"""For float32 logits up to about 6; both implementations differ from float64 by about 1e-6."""


@cache
def hf_model(case: str) -> Any:
    """A transformers model with random weights, biases, sinks and corrections."""
    settings = {**SIZES, **CASES[case]}
    config = transformers.AutoConfig.for_model(case.split("-")[0], **settings)
    config._experts_implementation = "eager"
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.1 * torch.randn(buffer.shape))
    return model.eval()


def tokens(rows: int = 2, length: int = 24) -> Tensor:
    """Random tokens, the same at every call."""
    return torch.randint(96, (rows, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers_in_both_directions(case: str, tmp_path: Path) -> None:
    """Each side reads the other's folder, and ours holds the same tensors byte for byte."""
    model, x = hf_model(case), tokens()
    model.save_pretrained(tmp_path)
    ours, expected = load_model(tmp_path), model(x).logits
    assert expected.abs().max() > 1
    torch.testing.assert_close(ours(x), expected, rtol=0, atol=TOLERANCE)
    save_model(ours, tmp_path / "again")
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "again", attn_implementation="eager"
    )
    torch.testing.assert_close(reloaded(x).logits, expected, rtol=0, atol=TOLERANCE)
    before, after = (
        load_file(folder / "model.safetensors") for folder in (tmp_path, tmp_path / "again")
    )
    assert before.keys() == after.keys()
    for name, values in before.items():
        assert values.dtype == after[name].dtype, name
        assert torch.equal(values, after[name]), name
    save_model(load_model(tmp_path / "again"), tmp_path / "third")
    for name in ("model.safetensors", "config.json"):
        first, second = (tmp_path / folder / name for folder in ("again", "third"))
        assert first.read_bytes() == second.read_bytes()


class ReferenceDecoder:
    """Reference decoder in plain loops over heads, tokens and experts."""

    def __init__(self, model: StagedModel, tensors: dict[str, Tensor]) -> None:
        self.model, self.config, self.w = model, model.config, tensors

    def norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        """RMS norm."""
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * self.w[name]

    def linear(self, x: Tensor, name: str) -> Tensor:
        """Linear map, with a bias if the folder has one."""
        y = x @ self.w[f"{name}.weight"].T
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

    def rotate(self, x: Tensor) -> Tensor:
        """Rotary embedding of (S, D), applied to the first dims."""
        config: Any = self.config
        context: Any = self.model.context(torch.arange(len(x))[None], None, None)
        cos, sin = (table[0].double() for table in context.tables[0])
        width = 2 * cos.shape[1]
        if config.rotary_interleaved:
            a, b = x[:, :width:2], x[:, 1:width:2]
            rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(1)
        else:
            a, b = x[:, : width // 2], x[:, width // 2 : width]
            rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), 1)
        return torch.cat((rotated, x[:, width:]), 1)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: int, head: int, scale: float
    ) -> Tensor:
        """Causal attention of one head, (S, D), with a window and a sink."""
        scores = q @ k.T * scale
        ahead = torch.arange(len(q)) - torch.arange(len(q))[:, None]
        window = self.config.window(layer)  # type: ignore[attr-defined]
        hidden = ahead > 0 if window is None else (ahead > 0) | (-ahead >= window)
        scores = scores.masked_fill(hidden, -torch.inf)
        sinks = self.w.get(f"model.layers.{layer}.self_attn.sinks")
        if sinks is None:
            return scores.softmax(1) @ v
        scores = torch.cat((scores, sinks[head].expand(len(q), 1)), 1)
        return scores.softmax(1)[:, :-1] @ v

    def attention(self, x: Tensor, layer: int) -> Tensor:
        """Grouped-query attention, (S, H) to (S, H)."""
        config: Any = self.config
        prefix, heads = f"model.layers.{layer}.self_attn", config.num_attention_heads
        if hasattr(config, "kv_lora_rank"):
            return self.latent_attention(x, layer)
        group_size = heads // config.num_key_value_heads
        q, k, v = (
            self.linear(x, f"{prefix}.{name}_proj").unflatten(-1, (-1, config.head_dim))
            for name in "qkv"
        )
        if config.query_key_norm:
            q = self.norm(q, f"{prefix}.q_norm.weight", config.rms_norm_eps)
            k = self.norm(k, f"{prefix}.k_norm.weight", config.rms_norm_eps)
        out = [
            self.attend(
                self.rotate(q[:, head]),
                self.rotate(k[:, head // group_size]),
                v[:, head // group_size],
                layer,
                head,
                config.head_dim**-0.5,
            )
            for head in range(heads)
        ]
        return self.linear(torch.cat(out, 1), f"{prefix}.o_proj")

    def latent_attention(self, x: Tensor, layer: int) -> Tensor:
        """Multi-head latent attention, (S, H) to (S, H)."""
        config: Any = self.config
        prefix, nope_dim = f"model.layers.{layer}.self_attn", config.qk_nope_head_dim
        q = self.norm(self.linear(x, f"{prefix}.q_a_proj"), f"{prefix}.q_a_layernorm.weight", 1e-6)
        q = self.linear(q, f"{prefix}.q_b_proj").unflatten(1, (config.num_attention_heads, -1))
        compressed = self.linear(x, f"{prefix}.kv_a_proj_with_mqa")
        latent_kv, k_rope = (
            compressed[:, : config.kv_lora_rank],
            self.rotate(compressed[:, config.kv_lora_rank :]),
        )
        k_nope_v = self.linear(
            self.norm(latent_kv, f"{prefix}.kv_a_layernorm.weight", 1e-6), f"{prefix}.kv_b_proj"
        )
        k_nope_v = k_nope_v.unflatten(1, (config.num_attention_heads, -1))
        out = [
            self.attend(
                torch.cat((q[:, head, :nope_dim], self.rotate(q[:, head, nope_dim:])), 1),
                torch.cat((k_nope_v[:, head, :nope_dim], k_rope), 1),
                k_nope_v[:, head, nope_dim:],
                layer,
                head,
                (nope_dim + config.qk_rope_head_dim) ** -0.5,
            )
            for head in range(config.num_attention_heads)
        ]
        return self.linear(torch.cat(out, 1), f"{prefix}.o_proj")

    def feed_forward(self, x: Tensor, name: str) -> Tensor:
        """SwiGLU feed-forward network."""
        gate, up = self.linear(x, f"{name}.gate_proj"), self.linear(x, f"{name}.up_proj")
        return self.linear(F.silu(gate) * up, f"{name}.down_proj")

    def mlp(self, x: Tensor, layer: int) -> Tensor:
        """Dense feed-forward network or mixture of experts, (S, H) to (S, H)."""
        prefix = f"model.layers.{layer}.mlp"
        if f"{prefix}.gate_proj.weight" in self.w:
            return self.feed_forward(x, prefix)
        experts = (
            self.gpt_oss_experts if f"{prefix}.router.weight" in self.w else self.deepseek_experts
        )
        return torch.stack([experts(token, prefix) for token in x])

    def deepseek_experts(self, x: Tensor, prefix: str) -> Tensor:
        """Sigmoid router with expert groups and a shared expert, for one token (H,)."""
        config: Any = self.config
        scores = (self.w[f"{prefix}.gate.weight"] @ x).sigmoid()
        corrected = (scores + self.w[f"{prefix}.gate.e_score_correction_bias"]).tolist()
        size = config.n_routed_experts // config.n_group
        group_scores = [
            sum(sorted(corrected[g * size :][:size])[-2:]) for g in range(config.n_group)
        ]
        groups = sorted(range(config.n_group), key=lambda g: -group_scores[g])[: config.topk_group]
        candidates = [e for e in range(config.n_routed_experts) if e // size in groups]
        experts = sorted(candidates, key=lambda e: -corrected[e])[: config.num_experts_per_tok]
        total = self.feed_forward(x, f"{prefix}.shared_experts")
        for e in experts:
            weight = scores[e] / (scores[experts].sum() + 1e-20) * config.routed_scaling_factor
            total = total + weight * self.feed_forward(x, f"{prefix}.experts.{e}")
        return total

    def gpt_oss_experts(self, x: Tensor, prefix: str) -> Tensor:
        """Softmax over the selected experts, clamped gates and biases, for one token (H,)."""
        config: Any = self.config
        logits = self.linear(x, f"{prefix}.router")
        experts = sorted(range(len(logits)), key=lambda e: -float(logits[e]))
        experts = experts[: config.num_experts_per_tok]
        weights, total = logits[experts].softmax(0), torch.zeros_like(x)
        for e, weight in zip(experts, weights, strict=True):
            gate_up = x @ self.w[f"{prefix}.experts.gate_up_proj"][e]
            gate_up = gate_up + self.w[f"{prefix}.experts.gate_up_proj_bias"][e]
            gate = gate_up[::2].clamp(max=config.swiglu_limit)
            up = gate_up[1::2].clamp(-config.swiglu_limit, config.swiglu_limit)
            inner = (up + 1) * gate * (1.702 * gate).sigmoid()
            out = inner @ self.w[f"{prefix}.experts.down_proj"][e]
            total = total + weight * (out + self.w[f"{prefix}.experts.down_proj_bias"][e])
        return total

    def __call__(self, row: Tensor) -> Tensor:
        """Logits (S, V) of tokens (S,)."""
        x, eps = self.w["model.embed_tokens.weight"][row], self.config.rms_norm_eps  # type: ignore[attr-defined]
        for layer in range(self.config.num_hidden_layers):
            prefix = f"model.layers.{layer}"
            x = x + self.attention(self.norm(x, f"{prefix}.input_layernorm.weight", eps), layer)
            x = x + self.mlp(self.norm(x, f"{prefix}.post_attention_layernorm.weight", eps), layer)
        return self.norm(x, "model.norm.weight", eps) @ self.w["lm_head.weight"].T


@pytest.mark.parametrize("case", ONE_PER_FAMILY)
def test_gradients_equal_a_loop_in_float64(case: str, tmp_path: Path) -> None:
    """Logits and all gradients, by tensor name of the folder, within 1e-12."""
    hf_model(case).save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype=torch.float64)
    save_model(model, tmp_path / "wide")
    tensors = load_file(tmp_path / "wide/model.safetensors")
    weights = {name: values.double().requires_grad_() for name, values in tensors.items()}
    row = tokens(1, 9)
    logits, truth = model(row)[0], ReferenceDecoder(model, weights)(row[0])
    torch.testing.assert_close(
        logits, truth, rtol=0, atol=1e-12 * float(truth.detach().abs().max())
    )
    scale = torch.arange(logits.numel(), dtype=torch.float64).view_as(logits).cos()
    (truth * scale).sum().backward()
    (logits * scale).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            gradient = parameter.grad
            parameter.copy_(torch.zeros_like(parameter) if gradient is None else gradient)
    save_model(model, tmp_path / "gradients")
    for name, actual in load_file(tmp_path / "gradients/model.safetensors").items():
        if name.endswith("e_score_correction_bias"):
            assert weights[name].grad is None
            continue
        expected = weights[name].grad
        expected = torch.zeros_like(actual) if expected is None else expected
        assert float((actual - expected).abs().max()) <= 1e-12 * float(expected.abs().max()), name


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("length", [24, 160])
def test_packed_documents_give_the_logits_of_each_alone(
    case: str, length: int, tmp_path: Path
) -> None:
    """Also for long documents, where attention runs per document."""
    hf_model(case).save_pretrained(tmp_path)
    model, x = load_model(tmp_path), tokens(1, length)
    cut = length // 2 - 3
    documents = (torch.arange(length) >= cut).int()[None]
    positions = torch.cat((torch.arange(cut), torch.arange(length - cut)))[None]
    packed = model(x, positions=positions, documents=documents)
    for span in (slice(0, cut), slice(cut, length)):
        torch.testing.assert_close(packed[:, span], model(x[:, span]), rtol=0, atol=TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_a_cache_gives_the_logits_of_the_full_text(case: str, tmp_path: Path) -> None:
    """A prefix and then a few tokens at a time, windows and sinks included."""
    hf_model(case).save_pretrained(tmp_path)
    model, x, cache = load_model(tmp_path), tokens(), KeyValueCache()
    parts = [model(part, cache=cache) for part in x.split([9, 1, 1, 2, *[1] * 11], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(x), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("layout", ["tensor=2", "pipeline=2"])
def test_split_gradients_equal_one_process_in_float64(layout: str) -> None:
    """Within 1e-12 of each tensor's maximum; one model has no query compression."""
    uncompressed = {**FAMILIES["deepseek_v3"], "q_lora_rank": None}
    all_settings = [uncompressed, *(FAMILIES[name] for name in ONE_PER_FAMILY)]
    jobs = [{"layout": layout, "settings": settings, "rows": 2} for settings in all_settings]
    split = run_processes(2, SPLITS, "gradients", jobs=jobs, digits="float64")
    single_jobs = [{**job, "layout": "data=1"} for job in jobs]
    (expected,) = run_processes(1, SPLITS, "gradients", jobs=single_jobs, digits="float64")
    for index, truth in enumerate(expected):
        assert set().union(*(ranks[index] for ranks in split)) == truth.keys()
        for ranks in split:
            for name, gradient in ranks[index].items():
                error = max(abs(a - b) for a, b in zip(gradient, truth[name], strict=True))
                assert error <= 1e-12 * max(map(abs, truth[name])), name


def to_mxfp4(values: Tensor) -> tuple[Tensor, Tensor]:
    """Convert expert matrices (E, columns, rows) to MXFP4 blocks and scales, rows first."""
    grouped = values.transpose(1, 2).unflatten(-1, (-1, 32))
    exponent = grouped.abs().amax(-1).clamp(min=1e-20).log2().floor() - 2
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    scaled = grouped / exponent.exp2()[..., None]
    code = (scaled.abs()[..., None] - table).abs().argmin(-1) + 8 * (scaled < 0)
    pairs = code.unflatten(-1, (-1, 2)).to(torch.uint8)
    return pairs[..., 0] | (pairs[..., 1] << 4), (exponent + 127).to(torch.uint8)


@torch.no_grad()
def test_a_gpt_oss_folder_in_mxfp4_is_dequantized_as_in_transformers(tmp_path: Path) -> None:
    """Weights equal bit for bit, and the logits too; a saved copy is a plain folder."""
    settings = {**SIZES, **CASES["gpt_oss"], "hidden_size": 64, "intermediate_size": 32}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model("gpt_oss", **settings)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = to_mxfp4(tensors.pop(name))
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    path = tmp_path / "config.json"
    quantized = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []}}
    path.write_text(json.dumps(json.loads(path.read_text()) | quantized))
    ours = load_model(tmp_path)
    save_model(ours, tmp_path / "plain")
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path,
        attn_implementation="eager",
        dtype=torch.float32,
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    )
    plain = load_file(tmp_path / "plain/model.safetensors")
    for name, values in reference.state_dict().items():
        assert torch.equal(plain[name], values.float()), name
    torch.testing.assert_close(ours(tokens()), reference(tokens()).logits, rtol=0, atol=TOLERANCE)


REFUSED: list[tuple[str, dict[str, object], str]] = [
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method='greedy' is not supported"),
    ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads must equal .*, got 2"),
    ("deepseek_v3", {"qk_head_dim": 11}, "qk_head_dim must be 10 .qk_nope_head_dim .*, got 11"),
    ("deepseek_v3", {"head_dim": 1}, "head_dim must be 4 .qk_rope_head_dim., got 1"),
    ("deepseek_v3", {"n_group": 3}, "divide the 8 experts, .* got n_group=3"),
    (
        "deepseek_v3",
        {"qk_rope_head_dim": 3, "qk_head_dim": 9, "head_dim": 3},
        "got 3",
    ),
    ("deepseek_v3", {"index_topk": 2048}, "index_topk=2048 is not supported"),
    ("deepseek_v3", {"n_routed_experts": 10**9}, "n_routed_experts must be"),
    ("glm4_moe", {"topk_group": 2}, "got n_group=1, topk_group=2"),
    ("glm4_moe", {"num_local_experts": 9}, "alias num_local_experts must be equal, got 8 and 9"),
    ("gpt_oss", {"sliding_window": None}, "need a sliding_window"),
    ("gpt_oss", {"layer_types": ["full_attention"]}, "layer_types must be"),
    ("gpt_oss", {"experts_per_token": 3}, "alias experts_per_token must be equal, got 2 and 3"),
]


@pytest.mark.parametrize(("case", "change", "message"), REFUSED)
def test_unsupported_settings_are_refused_by_name(
    case: str, change: dict[str, object], message: str
) -> None:
    """The one-line error names the setting, and no weight is read."""
    document = {**hf_model(case).config.to_dict(), **change}
    with pytest.raises(ParallelError, match=message) as caught:
        from_document(document)
    assert "\n" not in str(caught.value)


FAULTS: list[tuple[str, str, str]] = [
    (
        "deepseek_v3",
        "model.layers.1.mlp.experts.7.up_proj.weight",
        "lacks 1 of .*experts.7.up_proj",
    ),
    ("deepseek_v3", "model.layers.1.mlp.gate.e_score_correction_bias", "e_score_correction_bias"),
    ("gpt_oss", "model.layers.0.self_attn.sinks", "lacks 1 of .*self_attn.sinks"),
]


@pytest.mark.parametrize(("case", "name", "message"), FAULTS)
def test_a_missing_tensor_is_named(case: str, name: str, message: str, tmp_path: Path) -> None:
    """A missing expert, correction or sink is not replaced by a default."""
    hf_model(case).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ParallelError, match=message):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda x: x.transpose(1, 2), r"shape \(6, 88, 32\).* \(6, 32, 88\); it is transposed"),
        (lambda x: x[:5], r"shape \(5, 32, 88\).* \(6, 32, 88\); it has 5 of 6 experts"),
        (lambda x: x[:, :, 4:], r"shape \(6, 32, 84\).* \(6, 32, 88\); fix config.json"),
    ],
)
def test_experts_of_a_wrong_shape_are_named(
    damage: Callable[[Tensor], Tensor], message: str, tmp_path: Path
) -> None:
    """Transposed, too few, or narrower."""
    hf_model("gpt_oss").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors[name] = damage(tensors[name]).contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ParallelError, match=f"gate_up_proj' with {message}"):
        load_model(tmp_path)
