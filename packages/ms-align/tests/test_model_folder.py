"""Model folders are loaded completely or rejected."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ms_align import ModelError
from ms_align.models.folder import load_model, save_model

from .small_models import decoder, gpt2, llama

WEIGHTS = "model.safetensors"


def remove_tensor(folder: Path) -> None:
    """Remove the last tensor."""
    weights = load_file(folder / WEIGHTS)
    weights.pop(max(weights))
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def shrink_tensor(folder: Path) -> None:
    """Shorten the last tensor."""
    weights = load_file(folder / WEIGHTS)
    name = max(weights)
    weights[name] = weights[name][:-1].contiguous()
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def truncate_weights(folder: Path) -> None:
    """Truncate the file to half its size."""
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])


def remove_weights(folder: Path) -> None:
    """Keep only the configuration."""
    (folder / WEIGHTS).unlink()


def break_config(folder: Path) -> None:
    """Write invalid JSON."""
    (folder / "config.json").write_text("{")


def set_huge_layer_count(folder: Path) -> None:
    """Set a layer count that transformers would start to build."""
    config = json.loads((folder / "config.json").read_text())
    name = next(name for name in ("num_hidden_layers", "n_layer") if name in config)
    (folder / "config.json").write_text(json.dumps({**config, name: 1 << 62}))


DAMAGE = [
    *(remove_tensor, shrink_tensor, truncate_weights, remove_weights, break_config),
    set_huge_layer_count,
]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("build", [decoder, gpt2])
def test_a_damaged_folder_is_rejected_in_one_line(
    tmp_path: Path,
    build: Callable[[], torch.nn.Module],
    damage: Callable[[Path], None],
) -> None:
    """With ms-parallel, and with transformers, which would initialize missing weights randomly."""
    save_model(build(), tmp_path)
    damage(tmp_path)
    with pytest.raises(ModelError) as error:
        load_model(tmp_path)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("build", [decoder, gpt2, llama])
def test_a_saved_model_is_loaded_unchanged(
    tmp_path: Path, build: Callable[[], torch.nn.Module]
) -> None:
    """Also with tied embeddings, which are saved once."""
    model = build().eval()
    save_model(model, tmp_path)
    reloaded = load_model(tmp_path).eval()
    tokens = torch.tensor([[1, 2, 3]])
    expected, actual = model(tokens), reloaded(tokens)
    # Another library may load it and sum in a different order.
    torch.testing.assert_close(
        getattr(actual, "logits", actual),
        getattr(expected, "logits", expected),
        rtol=1e-4,
        atol=1e-4,
    )
