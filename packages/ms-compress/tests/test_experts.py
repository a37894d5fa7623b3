"""Experts as separate layers: quantized, calibrated, exported and read by each runtime."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import VOCABULARY, deepseek, enlarge, tokens
from torch import nn

from ms_compress import ExportError, LayerError, export, gptq, qat, verify
from ms_compress.cli import main
from ms_compress.deployment.verification import check_weights
from ms_compress.models.experts import separate_experts
from ms_compress.models.logits import model_logits
from ms_compress.quantization.layers import prepared_layers
from ms_compress.targets.target import open_runtime
from ms_parallel import load_model

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "num_experts_per_tok": 2,
}


def qwen3_moe() -> nn.Module:
    """A Qwen 3 with eight experts."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        **SIZES, intermediate_size=128, moe_intermediate_size=64, num_experts=8, norm_topk_prob=True
    )
    return enlarge(transformers.Qwen3MoeForCausalLM(config)).eval()


def mixtral() -> nn.Module:
    """A Mixtral with four experts, whose checkpoint has other names than its modules."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**SIZES, intermediate_size=96, num_local_experts=4)
    return enlarge(transformers.MixtralForCausalLM(config)).eval()


def gpt_oss() -> nn.Module:
    """A gpt-oss, whose experts have biases."""
    config = transformers.GptOssConfig(
        **SIZES, intermediate_size=64, num_local_experts=4, layer_types=["full_attention"] * 2
    )
    return transformers.GptOssForCausalLM(config)


@pytest.mark.parametrize(
    "build",
    [qwen3_moe, *(pytest.param(other, marks=pytest.mark.slow) for other in (mixtral, deepseek))],
)
def test_separate_experts_compute_the_same(build: Callable[[], nn.Module]) -> None:
    """Bit for bit, as each expert multiplies the same rows."""
    model, text = build().eval(), tokens()
    expected = model_logits(model, text)
    separate_experts(model)
    assert torch.equal(model_logits(model, text), expected)
    names = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert "model.layers.1.mlp.experts.3.down_proj" in names


@pytest.mark.parametrize(
    ("build", "loaded"),
    [
        (qwen3_moe, True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(qwen3_moe, False), (mixtral, True), (mixtral, False), (deepseek, False)]
        ),
    ],
)
def test_int4_experts_open_in_transformers(
    build: Callable[[], nn.Module], loaded: bool, tmp_path: Path
) -> None:
    """Logits are bit-identical to training, for models of transformers and ms-parallel."""
    model: nn.Module = build()
    if loaded:
        model.save_pretrained(tmp_path / "base")  # type: ignore[operator]
        model = load_model(tmp_path / "base")
    qat(separate_experts(model), "ct.int4_g32")
    folder = export(model, tmp_path / "out")
    check_weights(model, folder, "ct")
    text = tokens()
    difference = open_runtime(folder, "ct").logits(text) - model_logits(model, text)
    assert float(difference.abs().max()) < 5e-6  # ms-parallel sums experts in another order


@pytest.mark.parametrize(
    ("build", "method"),
    [
        (qwen3_moe, "magnitude"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(qwen3_moe, "wanda"), (qwen3_moe, "gradual"), (mixtral, "magnitude")]
        ),
    ],
)
def test_experts_are_pruned(build: Callable[[], nn.Module], method: str, tmp_path: Path) -> None:
    """Each linear layer of each expert is 2:4 sparse in a folder of the original's names."""
    model = build()
    model.save_pretrained(tmp_path / "base")  # type: ignore[operator]
    (tmp_path / "tokens.json").write_text(json.dumps(tokens(4, 33).tolist()))
    lines = ['pattern = "2:4"', f'method = "{method}"', "tuning.steps = 2"]
    lines += ["tuning.batch_size = 2", "tuning.sequence_length = 16", "rows = 4"]
    paths = {"model": "base", "dataset": "tokens.json", "output_dir": "out"}
    lines += [f'{key} = "{tmp_path / name}"' for key, name in paths.items()]
    lines += ["retrain = false"] if method == "magnitude" else []
    (tmp_path / "run.toml").write_text("\n".join(lines))
    assert main(["prune", str(tmp_path / "run.toml")]) == 0
    pruned = type(model).from_pretrained(tmp_path / "out").state_dict()  # type: ignore[attr-defined]
    compared = 0
    for name, weight in model.state_dict().items():
        if "_proj" not in name:  # routers, norms, embeddings and the head
            assert method != "magnitude" or torch.equal(pruned[name], weight), name
            continue
        groups, result = weight.reshape(-1, 4), pruned[name].reshape(-1, 4)
        assert bool(((result == 0).sum(1) == 2).all()), name
        if method == "magnitude":  # the two largest of four are unchanged
            smallest = groups.abs().argsort(dim=1, stable=True)[:, :2]
            assert torch.equal(result, groups.scatter(1, smallest, 0.0)), name
        compared += 1
    assert compared >= 2 * 6


@pytest.mark.parametrize("build", [mixtral, pytest.param(qwen3_moe, marks=pytest.mark.slow)])
def test_gguf_stacks_experts(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    """Each expert is read from the stacked tensor as it was trained."""
    model = qat(separate_experts(build()), "gguf.q4_k_m")  # rows of 64: falls back to Q8_0
    check_weights(model, export(model, tmp_path / "out"), "gguf")
    qat(model := separate_experts(build()), "gguf.q8_0", ignore=["*.experts.2.up_proj"])
    with pytest.raises(LayerError, match=r"are one tensor, blk\.0\.ffn_up_exps\.weight"):
        export(model, tmp_path / "mixed")


def test_experts_without_tokens_borrow_statistics(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """One token reaches two of eight experts; the others are rounded too, and a warning counts."""
    model = separate_experts(qwen3_moe())
    gptq(model, "ct.int4_g32", [tokens(1, 1)], damping=1.0)
    assert "6 of 8 experts saw no calibration token" in caplog.text
    for _, layer in prepared_layers(model):
        difference = layer.effective_weight() - layer.weight
        assert float(difference.detach().abs().max()) < 1e-5
    check_weights(model, export(model, tmp_path / "out"), "ct")


def test_rounded_inputs_of_experts_are_not_verified_in_transformers(tmp_path: Path) -> None:
    """The runtime computes experts as one module, which does not round their inputs."""
    model = qat(separate_experts(qwen3_moe()), "ct.fp8_dynamic")
    folder = export(model, tmp_path / "out")
    with pytest.raises(ExportError, match="computes experts without rounding their inputs"):
        verify(model, folder, "ct")


def test_scales_of_tensors_are_refused_for_experts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The runtime would silently ignore the scales; unreadable formats give a warning."""
    model = qat(separate_experts(qwen3_moe()), "ct.nvfp4a16")
    with pytest.raises(LayerError, match=r"got ct\.nvfp4a16; use ct\.mxfp4a16"):
        export(model, tmp_path / "out")
    export(qat(separate_experts(qwen3_moe()), "ct.mxfp8"), tmp_path / "mx")
    assert "transformers cannot read experts of ct.mxfp8" in caplog.text


def test_experts_with_biases_are_refused() -> None:
    """The message names them and the exception to set."""
    with pytest.raises(LayerError, match=r"got GptOssExperts; name them .*'\*\.experts'"):
        separate_experts(gpt_oss())


def test_the_command_quantizes_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder without a run file; no layer with experts is left in float."""
    qwen3_moe().save_pretrained(tmp_path / "model")  # type: ignore[operator]
    arguments = [str(tmp_path / "model"), "--scheme", "int4_g32", "--out", str(tmp_path / "out")]
    assert main(["quantize", *arguments, "--json"]) == 0
    assert '"float_layers":["lm_head"]' in capsys.readouterr().out
