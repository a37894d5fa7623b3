"""Families with experts against transformers: folders, logits, generation and damage."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from ms_parallel import Engine
from ms_parallel.errors import ConfigError, ModelError
from ms_parallel.models import architecture
from ms_parallel.weights import load_model, save_model

transformers.utils.logging.disable_progress_bar()

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": 64,
}
QWEN = {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"num_local_experts": 5}),
    "mixtral-window": (
        "mixtral",
        {"num_local_experts": 4, "sliding_window": 5, "tie_word_embeddings": True},
    ),
    "qwen3_moe": ("qwen3_moe", QWEN),
    "qwen3_moe-some": (
        "qwen3_moe",
        {
            **QWEN,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "attention_bias": True,
        },
    ),
    "olmoe": ("olmoe", {"num_experts": 7, "num_experts_per_tok": 2}),
    "olmoe-normalized": (
        "olmoe",
        {"num_experts": 4, "num_experts_per_tok": 4, "norm_topk_prob": True},
    ),
}
# Logits reach about 10; implementations differ by a few roundings, too little to change routes.
TOLERANCE = 1e-4


def hf_model(case: str) -> Any:
    """A transformers model with random weights and eager experts."""
    family, settings = CASES[case]
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **settings})
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(len(case))
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        model.set_experts_implementation("eager")
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model.eval()


def tokens() -> Tensor:
    """Rows longer than any window here."""
    return torch.randint(96, (2, 40), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_folders_and_logits_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    """Each side loads the other's folder with equal tensors, and logits agree."""
    reference = hf_model(case)
    reference.save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    ours = load_model(tmp_path / "theirs")
    expected = reference(tokens()).logits
    torch.testing.assert_close(ours(tokens()), expected, atol=TOLERANCE, rtol=0)
    save_model(ours, tmp_path / "ours")
    files = [load_file(path) for path in (tmp_path / "theirs").glob("*.safetensors")]
    before = {name: tensor for file in files for name, tensor in file.items()}
    after = load_file(tmp_path / "ours/model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", experts_implementation="eager"
    )
    assert torch.equal(reloaded.eval()(tokens()).logits, expected)
    save_model(load_model(tmp_path / "ours"), tmp_path / "twice")
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "twice" / name).read_bytes()


@pytest.mark.parametrize("case", ["mixtral-window", "qwen3_moe-some", "olmoe"])
@torch.no_grad()
def test_packed_documents_and_generation_equal_separate_ones(case: str, tmp_path: Path) -> None:
    """Experts process tokens independently, and a cache changes nothing."""
    reference = hf_model(case)
    reference.save_pretrained(tmp_path)
    row = tokens()[:1]
    documents = torch.tensor([[0] * 15 + [1] * 25]).int()
    positions = torch.cat((torch.arange(15), torch.arange(25)))[None]
    packed = load_model(tmp_path)(row, positions=positions, documents=documents)
    separate = [reference(row[:, :15]).logits, reference(row[:, 15:]).logits]
    torch.testing.assert_close(packed, torch.cat(separate, 1), atol=TOLERANCE, rtol=0)
    prompts = [row[0, :6].tolist(), row[0, 9:12].tolist()]
    generated = Engine(tmp_path).generate(
        prompts, max_new_tokens=5, stop_token=None, temperature=0.0
    )
    for prompt, new in zip(prompts, generated, strict=True):
        text = reference(torch.tensor([prompt + new])).logits[0].argmax(-1)
        assert text[len(prompt) - 1 : -1].tolist() == new


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An intact folder."""
    path = tmp_path_factory.mktemp("sound")
    hf_model("qwen3_moe").save_pretrained(path)
    return path


EXPERT = "model.layers.1.mlp.experts.{}.{}_proj.weight"


def remove_tensor(tensors: dict[str, Tensor]) -> None:
    """Remove a single tensor of an expert."""
    del tensors[EXPERT.format(4, "up")]


def remove_experts(tensors: dict[str, Tensor]) -> None:
    """Remove all experts but the first in every layer."""
    for name in [n for n in tensors if re.search(r"experts\.[1-5]\.", n)]:
        del tensors[name]


def add_expert(tensors: dict[str, Tensor]) -> None:
    """Add a tensor of an extra expert."""
    tensors[EXPERT.format(6, "up")] = tensors[EXPERT.format(5, "up")].clone()


def transpose(tensors: dict[str, Tensor]) -> None:
    """Transpose one matrix."""
    name = EXPERT.format(2, "down")
    tensors[name] = tensors[name].T.contiguous()


def stack_experts(tensors: dict[str, Tensor]) -> None:
    """Stack all experts in one tensor, as transformers has them in memory."""
    for layer in range(3):
        names = [f"model.layers.{layer}.mlp.experts.{e}.down_proj.weight" for e in range(6)]
        stack = torch.stack([tensors.pop(name) for name in names])
        tensors[f"model.layers.{layer}.mlp.experts.down_proj"] = stack


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            remove_tensor,
            r"lacks 1 of \d+ tensors, first 'model.layers.1.mlp.experts.4.up_proj.weight'",
        ),
        (remove_experts, r"lacks 45 of \d+ tensors, first 'model.layers.0.mlp.experts.1.down_proj"),
        (
            add_expert,
            r"experts.6.up_proj.weight', which .*; it asks for model.layers.1.mlp.experts.0 to 5",
        ),
        (
            transpose,
            r"experts.2.down_proj.weight' with shape \(20, 32\), .* \(32, 20\); it is transposed",
        ),
        (
            stack_experts,
            r"lacks 18 of \d+ tensors, first 'model.layers.0.mlp.experts.0.down_proj.weight'",
        ),
    ],
)
def test_a_folder_with_wrong_experts_is_refused_by_name(
    damage: Callable[[dict[str, Tensor]], None], message: str, folder: Path, tmp_path: Path
) -> None:
    """The one-line error names missing, extra, transposed and fused tensors, and what fits."""
    shutil.copytree(folder, tmp_path / "damaged")
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "damaged/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=message) as raised:
        load_model(tmp_path / "damaged")
    assert "\n" not in str(raised.value)


@torch.no_grad()
def test_a_model_without_an_expert_is_not_saved(folder: Path, tmp_path: Path) -> None:
    """The folder could not be loaded."""
    model = load_model(folder)
    del model.model.layers["1"].mlp.experts.down_proj  # type: ignore[union-attr,index]
    with pytest.raises(ModelError, match=r"has 'model.layers.1.mlp.experts.0.down_proj.weight'"):
        save_model(model, tmp_path / "lost")
    assert not (tmp_path / "lost/model.safetensors").exists()


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok must be at most 8"),
        ("olmoe", {"num_experts": 0}, "num_experts"),
        (
            "qwen3_moe",
            {"mlp_only_layers": "all"},
            "mlp_only_layers must be a list of layer indices, got 'all'",
        ),
        ("qwen3_moe", {"router_aux_loss_coef": -1.0}, "router_aux_loss_coef"),
    ],
)
def test_invalid_expert_settings_are_refused(
    family: str, settings: dict[str, Any], message: str
) -> None:
    """The message names the setting."""
    with pytest.raises(ConfigError, match=message):
        architecture(family, settings)
