"""LoRA on the stacked weights of experts: results, peft's files, training, quantized bases."""

from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file, save_file
from torch import nn

from ms_align import ConfigError, LoraOptions, ModelError, add_lora, load_lora
from ms_align.engines.assembly import start_engine
from ms_align.engines.local import LocalEngine
from ms_align.engines.optimizer import OptimizerOptions
from ms_align.lora.quantized_base import FORMATS, QuantizedExperts
from ms_align.lora.tensor_parallel import adapter_styles
from ms_align.losses.sft import SFTLoss
from ms_align.run.saving import write_result
from ms_parallel import load_model, save_model

from .small_models import SIZES, decoder
from .test_lora import TOKENS, logits

SMALL = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
DEEPSEEK = {**SMALL, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**SMALL, "num_experts": 4, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {**DEEPSEEK, "n_group": 1, "topk_group": 1},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "deepseek_v3": {
        **DEEPSEEK,
        "n_group": 1,
        "topk_group": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 12,
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    },
}
GATE_UP, DOWN = "experts.gate_up_proj", "experts.down_proj"
slow = pytest.mark.slow


def mixture(family: str = "qwen3_moe") -> nn.Module:
    """Build a small MoE model."""
    return decoder(family, **FAMILIES[family])


def adapted_mixture(family: str = "qwen3_moe", *targets: str, **options: Any) -> Any:
    """Adapt the attention output and experts of a mixture, with nonzero adapters."""
    settings = LoraOptions(
        rank=4,
        alpha=6.0,
        target_modules=("o_proj",),
        target_parameters=targets or (GATE_UP, DOWN),
        **options,
    )
    model = add_lora(mixture(family), settings)
    torch.manual_seed(1)
    with torch.no_grad():
        for layer in model.adapters().values():
            layer.lora_B.add_(torch.randn(layer.lora_B.shape), alpha=0.1)
    return model


@pytest.mark.parametrize(
    ("family", "targets", "expert_files"),
    [
        ("qwen3_moe", (GATE_UP, DOWN), "per_expert"),
        *(
            pytest.param(family, targets, expert_files, marks=slow)
            for family in FAMILIES
            for targets in ((GATE_UP, DOWN), (GATE_UP,), (DOWN,))
            for expert_files in ("per_expert", "stacked")
        ),
    ],
)
def test_expert_adapters_give_the_same_logits_in_peft_and_merged(
    family: str, targets: tuple[str, ...], expert_files: str, tmp_path: Path
) -> None:
    """Ours, ours reloaded, merged, transformers' model with ours, and peft with the same file."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    model = adapted_mixture(family, *targets, expert_files=expert_files, use_rslora=True)
    expected = logits(model)
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(mixture(family)))
        assert (logits(model) - expected).abs().max() > 0.1
    save_model(mixture(family), tmp_path / "base")  # type: ignore[arg-type]
    model.save_pretrained(tmp_path / "adapter")
    assert torch.equal(logits(load_lora(mixture(family), tmp_path / "adapter")), expected)

    def transformers_model() -> Any:
        return AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)

    close = {"rtol": 0.0, "atol": 1e-5}
    peft_model = peft.PeftModel.from_pretrained(transformers_model(), tmp_path / "adapter")
    torch.testing.assert_close(logits(peft_model), expected, **close)
    theirs = load_lora(transformers_model(), tmp_path / "adapter")
    torch.testing.assert_close(logits(theirs), expected, **close)
    torch.testing.assert_close(logits(theirs.merged_model()), expected, **close)
    with model.as_merged() as plain:
        save_model(plain, tmp_path / "merged")
    torch.testing.assert_close(logits(load_model(tmp_path / "merged")), expected, **close)
    assert torch.equal(logits(model), expected)


def test_experts_have_the_names_of_the_checkpoint_in_files(tmp_path: Path) -> None:
    """Gate and up share A and have half of B each; Mixtral's and gpt-oss' names differ."""
    model = adapted_mixture()
    model.save_pretrained(tmp_path / "qwen")
    tensors = load_file(tmp_path / "qwen/adapter_model.safetensors")
    layer = model.adapters()["model.layers.1.mlp.experts.gate_up_proj"]
    prefix = "base_model.model.model.layers.1.mlp.experts.3"
    for index, matrix in enumerate(("gate_proj", "up_proj")):
        assert torch.equal(tensors[f"{prefix}.{matrix}.lora_A.weight"], layer.lora_A[3])
        assert torch.equal(tensors[f"{prefix}.{matrix}.lora_B.weight"], layer.lora_B[3, index])
    for family, name in (
        ("mixtral", "layers.0.block_sparse_moe.experts.0.w2.lora_A.weight"),
        ("gpt_oss", "layers.0.mlp.experts.base_layer.lora_A.weight"),
    ):
        adapted_mixture(family).save_pretrained(tmp_path / family)
        names = load_file(tmp_path / family / "adapter_model.safetensors")
        assert f"base_model.model.model.{name}" in names


@slow
def test_separate_adapters_of_gate_and_up_are_fused(tmp_path: Path) -> None:
    """Files of earlier versions of transformers: each matrix has its own A; peft agrees."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    save_model(mixture("mixtral"), tmp_path / "base")  # type: ignore[arg-type]
    adapted_mixture("mixtral").save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter/adapter_model.safetensors"
    tensors = load_file(path)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if ".w3.lora_A" in name:
            tensor.normal_(std=0.2, generator=generator)
    save_file(tensors, path, {"format": "pt"})
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    expected = logits(peft.PeftModel.from_pretrained(base, tmp_path / "adapter"))
    loaded = load_lora(mixture("mixtral"), tmp_path / "adapter")
    torch.testing.assert_close(logits(loaded), expected, rtol=0.0, atol=1e-5)
    with pytest.raises(ModelError, match="different ranks"):
        loaded.save_pretrained(tmp_path / "again")
    merged = loaded.merged_model()
    torch.testing.assert_close(logits(merged), expected, rtol=0.0, atol=1e-5)


@slow
def test_adapters_that_peft_trains_on_experts_are_read(tmp_path: Path) -> None:
    """Peft's own files, on the transformers model and on ours."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    save_model(mixture(), tmp_path / "base")  # type: ignore[arg-type]
    config = peft.LoraConfig(r=3, target_modules=["q_proj"], target_parameters=[DOWN, GATE_UP])
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    peft_model = peft.get_peft_model(base, config)
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    peft_model.eval().save_pretrained(tmp_path / "adapter")
    loaded = load_lora(mixture(), tmp_path / "adapter")
    torch.testing.assert_close(logits(loaded), logits(peft_model), rtol=0.0, atol=1e-5)


def test_gradients_of_expert_adapters_are_those_of_the_merged_weight() -> None:
    """DA and dB follow from the gradient of W + s·B·A, expert by expert."""
    model = adapted_mixture()
    batch = {"tokens": TOKENS, "targets": TOKENS.roll(-1, 1)}
    cross_entropy = nn.functional.cross_entropy
    cross_entropy(model(TOKENS).flatten(0, 1), batch["targets"].flatten()).backward()
    layers = {name: layer for name, layer in model.adapters().items() if "experts" in name}
    grads = {name: (layer.lora_A.grad, layer.lora_B.grad) for name, layer in layers.items()}
    with model.as_merged() as plain:
        weights = {name: plain.get_submodule(name).weight.requires_grad_(True) for name in layers}
        cross_entropy(plain(TOKENS).flatten(0, 1), batch["targets"].flatten()).backward()
        weight_grads = {name: weight.grad.flatten(1, -2) for name, weight in weights.items()}
    for name, layer in layers.items():
        grad, b = weight_grads[name], layer.lora_B.flatten(1, -2)  # (E, O, I), (E, O, r)
        torch.testing.assert_close(grads[name][0], layer.scale * b.mT @ grad, rtol=1e-3, atol=1e-6)
        b_grad = layer.scale * grad @ layer.lora_A.mT
        torch.testing.assert_close(grads[name][1].flatten(1, -2), b_grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("nf4", "qwen3_moe"),
        *(pytest.param(name, "gpt_oss", marks=slow) for name in FORMATS),
    ],
)
def test_experts_are_quantized_one_by_one_under_their_adapters(name: str, family: str) -> None:
    """The logits are those of a model with the rounded weights, merged and resumed bit for bit."""
    model = adapted_mixture(family, quantize_base=name)
    expected = logits(model)
    layer = next(m for m in model.modules() if isinstance(m, QuantizedExperts))
    experts: Any = mixture(family).get_submodule("model.layers.0.mlp.experts")
    stored = FORMATS[name].store(experts.gate_up_proj.weight[2].detach().flatten(0, -2))
    for key, buffer in layer.named_buffers(recurse=False):
        assert torch.equal(buffer[2], stored[key])
    rounded = mixture(family)
    with torch.no_grad():
        for target, adapter in model.adapters().items():
            rounded.get_submodule(target).weight.copy_(adapter.base_layer.weight)
    plain = add_lora(rounded, evolve(model.options, quantize_base="none"))
    adapters = {key: value for key, value in model.state_dict().items() if "lora_" in key}
    plain.load_state_dict(adapters, strict=False)
    torch.testing.assert_close(logits(plain), expected, rtol=0.0, atol=1e-5)
    batch = {"tokens": TOKENS, "targets": TOKENS.roll(-1, 1)}
    engines = [LocalEngine(m, OptimizerOptions(learning_rate=1e-2)) for m in (model, plain)]
    for _ in range(2):
        losses = [engine.step(batch, SFTLoss()).loss for engine in engines]
        assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    trained = logits(model)
    model.merge()
    torch.testing.assert_close(logits(model), trained, rtol=0.0, atol=1e-5)
    model.unmerge()
    assert torch.equal(logits(model), trained)


@slow
def test_quantized_experts_of_a_transformers_model_merge_into_its_folder(tmp_path: Path) -> None:
    """ms-parallel stores their gate and up matrices in separate dims."""
    from transformers import AutoModelForCausalLM, Qwen2MoeConfig

    torch.manual_seed(0)
    sizes: dict[str, Any] = {**SIZES, **SMALL, "num_experts": 4}
    config = Qwen2MoeConfig(**sizes, shared_expert_intermediate_size=24)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    lora = {"quantize_base": "nf4", "target_parameters": [GATE_UP, DOWN]}
    engine: Any = start_engine(tmp_path / "base", layout={"data": 1}, lora=lora)
    write_result(engine, tmp_path / "run", None)
    loaded = load_lora(load_model(tmp_path / "base"), tmp_path / "run/adapter")
    assert len(loaded.adapters()) == len(engine.adapters.models[0].adapters())
    merged, base = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("run/model", "base")
    )
    # NF4's largest error is 0.152 of the largest weight in a block of 64.
    assert 0 < (logits(merged) - logits(base)).abs().max() < 0.1
    experts = {name: layer for name, layer in loaded.adapters().items() if ".experts." in name}
    with pytest.raises(ConfigError, match="the experts of a transformers model"):
        adapter_styles(experts, None)


def test_unknown_expert_weights_and_unsupported_settings_are_rejected(tmp_path: Path) -> None:
    """One line that names the setting."""
    with pytest.raises(ConfigError, match=r"has: experts\.down_proj, experts\.gate_up_proj"):
        add_lora(mixture(), LoraOptions(target_parameters=("experts.w1",)))
    with pytest.raises(ConfigError, match=r"got 'down_proj'; the model has: none"):
        add_lora(decoder(), LoraOptions(target_parameters=("down_proj",)))
    for setting in ({"use_dora": True}, {"dropout": 0.1}):
        with pytest.raises(ConfigError, match="does not support experts"):
            LoraOptions(target_parameters=(DOWN,), **setting)  # type: ignore[arg-type]
    adapted_mixture("qwen3_moe", DOWN).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"has no linear layer .*experts\.0\.down_proj"):
        load_lora(decoder(), tmp_path)
    adapted_mixture("qwen3_moe", DOWN, expert_files="stacked").save_pretrained(tmp_path / "stacked")
    with pytest.raises(ModelError, match="names no expert weights of the model"):
        load_lora(decoder(), tmp_path / "stacked")
    narrow = {**FAMILIES["qwen3_moe"], "moe_intermediate_size": 16}
    with pytest.raises(ModelError, match="has 4 experts of"):
        load_lora(decoder("qwen3_moe", **narrow), tmp_path)
