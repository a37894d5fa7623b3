"""Families with experts: folders, logits and texts against transformers; damage named."""

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
# Logits reach about 10; transformers' and ours differ by a few roundings, far below a choice.
TOLERANCE = 1e-4


def theirs(case: str) -> Any:
    """A model of transformers with random weights, its experts one after the other."""
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
def test_folders_and_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    """Theirs reads as ours, ours as theirs, name by name and bit for bit; logits agree."""
    reference = theirs(case)
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
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", experts_implementation="eager"
    )
    assert torch.equal(again.eval()(tokens()).logits, expected)
    save_model(load_model(tmp_path / "ours"), tmp_path / "twice")
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "twice" / name).read_bytes()


@pytest.mark.parametrize("case", ["mixtral-window", "qwen3_moe-some", "olmoe"])
@torch.no_grad()
def test_packed_documents_and_generated_texts_are_those_of_each_alone(
    case: str, tmp_path: Path
) -> None:
    """Experts see tokens one by one; a cache changes nothing."""
    reference = theirs(case)
    reference.save_pretrained(tmp_path)
    row = tokens()[:1]
    documents = torch.tensor([[0] * 15 + [1] * 25]).int()
    positions = torch.cat((torch.arange(15), torch.arange(25)))[None]
    packed = load_model(tmp_path)(row, positions=positions, documents=documents)
    alone = [reference(row[:, :15]).logits, reference(row[:, 15:]).logits]
    torch.testing.assert_close(packed, torch.cat(alone, 1), atol=TOLERANCE, rtol=0)
    prompts = [row[0, :6].tolist(), row[0, 9:12].tolist()]
    written = Engine(tmp_path).generate(prompts, max_new_tokens=5, stop_token=None, temperature=0.0)
    for prompt, new in zip(prompts, written, strict=True):
        text = reference(torch.tensor([prompt + new])).logits[0].argmax(-1)
        assert text[len(prompt) - 1 : -1].tolist() == new


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound folder to damage."""
    where = tmp_path_factory.mktemp("sound")
    theirs("qwen3_moe").save_pretrained(where)
    return where


EXPERT = "model.layers.1.mlp.experts.{}.{}_proj.weight"


def lose(tensors: dict[str, Tensor]) -> None:
    """One of an expert's three."""
    del tensors[EXPERT.format(4, "up")]


def lose_seven(tensors: dict[str, Tensor]) -> None:
    """All but the first expert of all layers."""
    for name in [n for n in tensors if re.search(r"experts\.[1-5]\.", n)]:
        del tensors[name]


def add(tensors: dict[str, Tensor]) -> None:
    """An expert too many."""
    tensors[EXPERT.format(6, "up")] = tensors[EXPERT.format(5, "up")].clone()


def turn(tensors: dict[str, Tensor]) -> None:
    """One matrix the other way."""
    name = EXPERT.format(2, "down")
    tensors[name] = tensors[name].T.contiguous()


def fuse(tensors: dict[str, Tensor]) -> None:
    """All experts in one tensor, as transformers has them in memory."""
    for layer in range(3):
        names = [f"model.layers.{layer}.mlp.experts.{e}.down_proj.weight" for e in range(6)]
        stack = torch.stack([tensors.pop(name) for name in names])
        tensors[f"model.layers.{layer}.mlp.experts.down_proj"] = stack


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lose, r"lacks 1 of \d+ tensors, first 'model.layers.1.mlp.experts.4.up_proj.weight'"),
        (lose_seven, r"lacks 45 of \d+ tensors, first 'model.layers.0.mlp.experts.1.down_proj"),
        (
            add,
            r"experts.6.up_proj.weight', which .*; it asks for model.layers.1.mlp.experts.0 to 5",
        ),
        (
            turn,
            r"experts.2.down_proj.weight' with shape \(20, 32\), .* \(32, 20\); it is transposed",
        ),
        (fuse, r"lacks 18 of \d+ tensors, first 'model.layers.0.mlp.experts.0.down_proj.weight'"),
    ],
)
def test_a_folder_with_other_experts_is_refused_by_name(
    damage: Callable[[dict[str, Tensor]], None], says: str, folder: Path, tmp_path: Path
) -> None:
    """Missing, extra, transposed and fused ones: one line says which, and what fits."""
    shutil.copytree(folder, tmp_path / "damaged")
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "damaged/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=says) as raised:
        load_model(tmp_path / "damaged")
    assert "\n" not in str(raised.value)


@torch.no_grad()
def test_a_model_that_has_lost_an_expert_is_not_saved(folder: Path, tmp_path: Path) -> None:
    """Rather than a folder that nobody can read."""
    model = load_model(folder)
    del model.model.layers["1"].mlp.experts.down_proj  # type: ignore[union-attr,index]
    with pytest.raises(ModelError, match=r"has 'model.layers.1.mlp.experts.0.down_proj.weight'"):
        save_model(model, tmp_path / "lost")
    assert not (tmp_path / "lost/model.safetensors").exists()


@pytest.mark.parametrize(
    ("family", "settings", "says"),
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
def test_a_configuration_that_cannot_be_is_refused(
    family: str, settings: dict[str, Any], says: str
) -> None:
    """By the setting's name."""
    with pytest.raises(ConfigError, match=says):
        architecture(family, settings)
