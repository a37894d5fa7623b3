"""Files with NaN or infinite weights are rejected when they are read."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from small_models import decoder, llama

from ms_align import LoraOptions, RewardModel, SFTTrainer, add_lora, load_lora
from ms_align.errors import AlignError, ConfigError, ModelError
from ms_align.models.folder import load_model
from ms_align.processes import pad_to_ranks, rows_of_rank
from ms_align.rewards.named import named_rewards
from ms_align.run import checkpoint
from ms_align.run.checkpoint import State


def spoil(path: Path, value: float) -> None:
    """Set one value in a safetensors file."""
    tensors = load_file(path)
    tensor = tensors[max(tensors)]
    tensor.view(-1)[-1] = value
    save_file(tensors, path, {"format": "pt"})


def adapter(folder: Path) -> Callable[[], object]:
    """An adapter of a small decoder."""
    add_lora(decoder(), LoraOptions(rank=2)).save_pretrained(folder)
    return lambda: load_lora(decoder(), folder)


def reward_head(folder: Path) -> Callable[[], object]:
    """The head of a reward model."""
    RewardModel(decoder()).save(folder)
    return lambda: RewardModel.load(folder)


def reward_body(folder: Path) -> Callable[[], object]:
    """The language model of a reward model."""
    RewardModel(decoder()).save(folder)
    return lambda: named_rewards(str(folder))


def classifier(folder: Path) -> Callable[[], object]:
    """A reward model of transformers."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_labels=1, pad_token_id=0)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    return lambda: named_rewards(str(folder))


def model(folder: Path) -> Callable[[], object]:
    """A language model."""
    llama().save_pretrained(folder)
    return lambda: load_model(folder)


FILES = {
    "adapter_model.safetensors": adapter,
    "reward_head.safetensors": reward_head,
    "body/model.safetensors": reward_body,
    "model.safetensors": model,
    "./model.safetensors": classifier,
}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", FILES)
def test_a_weight_that_is_not_finite_is_rejected(name: str, value: float, tmp_path: Path) -> None:
    """One line that names the file or folder; every value is checked."""
    load = FILES[name](tmp_path)
    load()
    spoil(tmp_path / name, value)
    with pytest.raises(AlignError, match=r"finite|NaN") as caught:
        load()
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_extreme_alpha_of_an_adapter_is_rejected(tmp_path: Path) -> None:
    """In a file or as a setting; float32 would lose the update."""
    load = adapter(tmp_path)
    path = tmp_path / "adapter_config.json"
    text = path.read_text()
    assert '"lora_alpha": 16.0' in text
    for alpha in ("1e308", "1e7", "0.0", "-1.0"):
        path.write_text(text.replace('"lora_alpha": 16.0', f'"lora_alpha": {alpha}'))
        with pytest.raises(ModelError, match="lora_alpha must be above 0 and at most"):
            load()
    with pytest.raises(ConfigError, match="alpha"):
        LoraOptions(alpha=1e308)


def test_training_state_that_is_not_finite_counts_as_damaged(sets: Path, tmp_path: Path) -> None:
    """The previous checkpoint is used, as for any other damage."""
    trainer = SFTTrainer(
        model=decoder(),
        steps=2,
        sequence_length=64,
        checkpoint_every=1,
        output_dir=tmp_path,
        progress=False,
    )
    trainer.train(sets / "copy")
    state = checkpoint.read(tmp_path / "checkpoints/step-00000002")
    tensors = dict(state.tensors)
    name = next(name for name in tensors if name.startswith("optimizer.exp_avg_sq."))
    tensors[name] = tensors[name].clone().fill_(torch.nan)
    checkpoint.write(tmp_path / "checkpoints", 2, State(tensors=tensors, facts=state.facts))
    shutil.rmtree(tmp_path / "model")
    assert trainer.train(sets / "copy").finished
    assert (tmp_path / "checkpoints/step-00000002.damaged").is_dir()


@given(st.integers(1, 40), st.integers(1, 17))
def test_rows_are_divided_equally_with_padding_at_the_end(count: int, ranks: int) -> None:
    """Also with fewer rows than ranks, down to one."""
    rows = list(range(count))
    padded = pad_to_ranks(rows, ranks)
    shares = [padded[rows_of_rank(len(padded), rank, ranks)] for rank in range(ranks)]
    assert {len(share) for share in shares} == {-(-count // ranks)}
    joined = [row for share in shares for row in share]
    assert joined[:count] == rows
    assert set(joined[count:]) <= {rows[-1]}
