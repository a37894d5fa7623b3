"""llama.cpp computes what training computed. Run by `nox -s deploy`, which builds its package."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("llama_cpp", reason="run `nox -s deploy`, which builds llama.cpp")
sys.path.insert(0, str(Path(__file__).parent))
from models import VOCABULARY, decoder, llama, qwen3, tokens
from mutants import GGUF, mutate_gguf

from ms_compress import Tuning, VerifyError, export, qat, tune, verify
from ms_compress.logits import model_logits
from ms_compress.runtimes import open_runtime
from ms_compress.verification import compare
from ms_parallel import load_model, save_model

SCHEMES = ["gguf.q8_0", "gguf.q4_0"]
MODELS: dict[str, Callable[[int], nn.Module]] = {
    "ms_parallel": decoder,
    "llama": llama,
    "qwen3": qwen3,
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", SCHEMES)
def test_one_layer_agrees(name: str, model: str, tmp_path: Path) -> None:
    """With inputs rounded in training as llama.cpp rounds them: 1e-4 on average at most.

    Sums are of other orders, so now and then an input falls on the other side of a border between
    two codes; such a one moves a logit by about one code of it, 1/127 of a block's largest.
    """
    prepared = qat(MODELS[model](1), name)
    folder = export(prepared, tmp_path / "out", target=name, verify=True)
    text = tokens(2, 100)
    found = compare(model_logits(prepared, text), open_runtime(folder, "gguf").logits(text))
    assert found.mean <= 1e-4
    assert found.argmax == 1.0


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers that have read half of a module of the standard library, byte by byte.

    The logits of fresh weights are near ties wherever one looks; these have learnt to differ.
    """
    model = decoder(6)
    how = Tuning(steps=150, batch_size=8, sequence_length=64, learning_rate=2e-3)
    tune(model, source_bytes()[: 8 * 65 * 40].view(-1, 65), how)
    folder = tmp_path_factory.mktemp("taught") / "model"
    save_model(model, folder)
    return folder


def source_bytes() -> torch.Tensor:
    """Of argparse.py, which has some 98,000."""
    text = Path(argparse.__file__).read_bytes()
    return torch.tensor([byte for byte in text if byte < VOCABULARY])


@pytest.mark.parametrize("name", SCHEMES)
def test_six_layers_agree_better_with_inputs_rounded_in_training(
    name: str, taught: Path, tmp_path: Path
) -> None:
    """At 99% of positions of a text; weight-only training is farther from llama.cpp by a factor."""
    prepared = qat(load_model(taught), name)
    folder = export(prepared, tmp_path / "out")
    text = source_bytes()[-1600:].view(-1, 100)
    there = open_runtime(folder, "gguf").logits(text)
    simulated = compare(model_logits(prepared, text), there)
    weights_alone = qat(load_model(taught), name, activations=False)
    assert simulated.mean < 0.7 * compare(model_logits(weights_alone, text), there).mean
    assert simulated.argmax >= 0.99


@pytest.mark.parametrize("name", SCHEMES)
def test_embedding_and_head_of_one_weight_are_quantised_once(name: str, tmp_path: Path) -> None:
    """The tied weight is rounded where tokens are looked up, and where logits are made."""
    prepared = qat(decoder(1), name, embeddings=True, head=True, learned_scales=True)
    folder = export(prepared, tmp_path / "out")
    text = tokens(2, 100)
    found = compare(model_logits(prepared, text), open_runtime(folder, "gguf").logits(text))
    assert found.mean <= 1e-3  # the head's input is rounded too: a border moves a whole row


@pytest.mark.parametrize("mutant", GGUF)
def test_a_wrong_file_is_refused(mutant: str, tmp_path: Path) -> None:
    """llama.cpp loads each of these without complaint."""
    prepared = qat(decoder(), "gguf.q4_0")
    folder = export(prepared, tmp_path / "out", verify=True)
    mutate_gguf(str(folder / "model.gguf"), GGUF[mutant])
    with pytest.raises(VerifyError, match="is not this model"):
        verify(prepared, folder, "gguf")
