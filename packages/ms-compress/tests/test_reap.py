"""REAP: scores against a slow reference, and folders with fewer experts."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from models import deepseek, llama, tokens
from test_experts import gpt_oss, mixtral, qwen3_moe
from torch import Tensor, nn

from ms_compress import ConfigError, LayerError
from ms_compress.cli import main
from ms_compress.methods.reap import reap_scores, remove_experts
from ms_compress.models.logits import model_logits
from ms_parallel import load_model


def test_scores_are_means_of_weight_times_output_norm() -> None:
    """Against one token and one expert at a time, with the router's own weights."""
    model, text = qwen3_moe(), tokens(2, 24)
    scores = reap_scores(model, [text[:1], text[1:]])
    layer = model.get_submodule("model.layers.1.mlp")
    inputs: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    model_logits(model, text)
    hook.remove()
    gate_up, down = (
        layer.get_parameter(f"experts.{name}") for name in ("gate_up_proj", "down_proj")
    )
    products: dict[int, list[float]] = {index: [] for index in range(8)}
    for row in inputs[0].flatten(0, 1):
        _, weights, indices = layer.get_submodule("gate")(row[None])
        for weight, index in zip(weights[0].tolist(), indices[0].tolist(), strict=True):
            gate, up = (gate_up[index] @ row).chunk(2)
            output = down[index] @ (nn.functional.silu(gate) * up)
            products[index].append(weight * float(output.detach().norm()))
    means = [sum(values) / max(1, len(values)) for values in products.values()]
    result = scores["model.layers.1.mlp.experts"]
    assert result.tokens.tolist() == [len(values) for values in products.values()]
    torch.testing.assert_close(result.mean, torch.tensor(means).double(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "build",
    [qwen3_moe, *(pytest.param(other, marks=pytest.mark.slow) for other in (mixtral, deepseek))],
)
def test_folder_opens_with_fewer_experts(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    """Transformers and ms-parallel give the smaller model's logits."""
    model, text = build().eval(), tokens(4, 48)
    scores = reap_scores(model, [text])
    smaller = remove_experts(model, scores, 0.5)
    smaller.save_pretrained(tmp_path / "out")  # type: ignore[operator]
    expected = model_logits(smaller, text)
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(model_logits(opened, text), expected)
    loaded = load_model(tmp_path / "out")
    torch.testing.assert_close(model_logits(loaded, text), expected, rtol=0, atol=1e-5)
    assert torch.equal(
        model_logits(remove_experts(model, scores, 0.0), text), model_logits(model, text)
    )


@pytest.mark.slow
def test_experts_with_biases_are_removed_too() -> None:
    """A gpt-oss with half of its experts, whose router chooses among the others."""
    model, text = gpt_oss().eval(), tokens(2, 24)
    smaller = remove_experts(model, reap_scores(model, [text]), 0.5)
    assert smaller.get_parameter("model.layers.0.mlp.experts.down_proj_bias").shape[0] == 2
    assert smaller.get_parameter("model.layers.1.mlp.router.weight").shape[0] == 2
    assert bool(model_logits(smaller, text).isfinite().all())


def test_removed_experts_are_those_with_the_lowest_scores() -> None:
    """An expert whose output is zero has score 0; removing it changes only its tokens' logits."""
    model, text = qwen3_moe(), tokens(4, 48)
    with torch.no_grad():
        for layer in range(2):
            model.get_parameter(f"model.layers.{layer}.mlp.experts.down_proj")[5].zero_()
    scores = reap_scores(model, [text])
    smaller = remove_experts(model, scores, 1 / 8)
    router = model.get_parameter("model.layers.1.mlp.gate.weight")
    kept = [index for index in range(8) if index != 5]
    assert torch.equal(smaller.get_parameter("model.layers.1.mlp.gate.weight"), router[kept])


def test_too_few_experts_are_refused() -> None:
    """The message has the smallest number that can be left, and a fraction to use."""
    model = qwen3_moe()
    scores = reap_scores(model, [tokens(1, 8)])
    with pytest.raises(ConfigError, match=r"at least 2 of 8 experts.*which leaves 1; use 0\.5"):
        remove_experts(model, scores, 0.9)
    with pytest.raises(LayerError, match="removes experts, and LlamaForCausalLM has none"):
        reap_scores(llama(1), [tokens(1, 8)])


def test_the_command_removes_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder has fewer experts; a pattern such as 2:4 is refused with exit code 2."""
    qwen3_moe().save_pretrained(tmp_path / "model")  # type: ignore[operator]
    (tmp_path / "tokens.json").write_text(json.dumps(tokens(8, 33).tolist()))
    run = tmp_path / "run.toml"
    run.write_text(
        f'model = "{tmp_path}/model"\noutput_dir = "{tmp_path}/out"\n'
        f'dataset = "{tmp_path}/tokens.json"\nrows = 8\nmethod = "reap"\npattern = 0.25\n'
        "retrain = false\n[tuning]\nsequence_length = 31\n"
    )
    assert main(["prune", str(run), "--set", "pattern=2:4"]) == 2
    assert "removes experts, so pattern must be their fraction" in capsys.readouterr().err
    assert main(["prune", str(run)]) == 0
    assert "6 experts are left in each layer" in capsys.readouterr().out
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.get("num_experts", config.get("num_local_experts")) == 6
