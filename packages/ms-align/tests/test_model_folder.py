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


def lacks_one(folder: Path) -> None:
    """Remove the last tensor."""
    weights = load_file(folder / WEIGHTS)
    weights.pop(max(weights))
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def has_another_shape(folder: Path) -> None:
    """Shorten the last tensor."""
    weights = load_file(folder / WEIGHTS)
    name = max(weights)
    weights[name] = weights[name][:-1].contiguous()
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def is_cut(folder: Path) -> None:
    """Cut the file in half."""
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])


def has_no_weights(folder: Path) -> None:
    """Keep only the configuration."""
    (folder / WEIGHTS).unlink()


def has_a_broken_config(folder: Path) -> None:
    """Write invalid JSON."""
    (folder / "config.json").write_text("{")


def asks_for_endless_layers(folder: Path) -> None:
    """Set a number of layers that transformers would build one by one."""
    config = json.loads((folder / "config.json").read_text())
    name = next(name for name in ("num_hidden_layers", "n_layer") if name in config)
    (folder / "config.json").write_text(json.dumps({**config, name: 1 << 62}))


DAMAGES = [
    *(lacks_one, has_another_shape, is_cut, has_no_weights, has_a_broken_config),
    asks_for_endless_layers,
]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("make", [decoder, gpt2])
def test_a_damaged_folder_is_rejected_in_one_line(
    tmp_path: Path,
    make: Callable[[], torch.nn.Module],
    damage: Callable[[Path], None],
) -> None:
    """With ms-parallel and with transformers, which would initialize weights randomly."""
    save_model(make(), tmp_path)
    damage(tmp_path)
    with pytest.raises(ModelError) as refused:
        load_model(tmp_path)
    assert str(tmp_path) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("make", [decoder, gpt2, llama])
def test_a_saved_model_is_loaded_unchanged(
    tmp_path: Path, make: Callable[[], torch.nn.Module]
) -> None:
    """Also with tied embeddings, which are saved once."""
    model = make().eval()
    save_model(model, tmp_path)
    again = load_model(tmp_path).eval()
    tokens = torch.tensor([[1, 2, 3]])
    want, got = model(tokens), again(tokens)
    # Another library may read it, which adds in another order.
    torch.testing.assert_close(
        getattr(got, "logits", got), getattr(want, "logits", want), rtol=1e-4, atol=1e-4
    )
