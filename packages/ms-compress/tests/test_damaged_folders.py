"""Problems of an evaluated folder are reported in one line before anything is timed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import onnx
import pytest
import torch
from folders import VOCABULARY, model, write_model, write_shards
from safetensors.torch import load_file, save_file
from torch import Tensor

from ms_compress import ExportError, export, qat
from ms_compress.cli import main
from ms_compress.targets.target import open_runtime
from ms_parallel.models import Decoder
from ms_parallel.weights import initialize, save_model

METHOD = "compressed-tensors"
UP = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain model, its exports for all bundled runtimes, and token shards."""
    folder = tmp_path_factory.mktemp("work")
    write_model(folder / "base")
    write_shards(folder)
    export(qat(model(), "ct.int4_g32"), folder / "ct")
    export(qat(model(), "ort.matmulnbits"), folder / "ort")
    export(qat(model(), "gguf.q4_0"), folder / "gguf")
    return folder


@pytest.fixture
def error_for(work: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that gives the error of `evaluate` for a damaged copy of a folder."""

    def evaluate_damaged(name: str, damage: Callable[[Path], object] = str, **settings: int) -> str:
        folder = tmp_path / name
        shutil.copytree(work / name, folder)
        damage(folder)
        lengths = {"sequence_length": 32, "sequences": 4, "prefill_tokens": 16, "decode_tokens": 4}
        numbers = {**lengths, "rounds": 1, **settings}
        base, models = (folder, "") if name == "base" else (work / "base", f'x = "{folder}"')
        (tmp_path / "run.toml").write_text(
            f'baseline = "{base}"\ndataset = "{work}/shards"\noutput_dir = "{tmp_path}/report"\n'
            + "".join(f"{key} = {value}\n" for key, value in numbers.items())
            + f"[models]\n{models}\n"
        )
        assert main(["evaluate", str(tmp_path / "run.toml")]) == 2
        *progress, text = capfd.readouterr().err.splitlines()
        assert all(line.startswith("row ") for line in progress)
        assert str(folder) in text
        return str(text)

    return evaluate_damaged


def damage_config(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Damage a folder's config.json."""

    def damage(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(change(json.loads(path.read_text()))))

    return damage


def damage_tensors(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    """Damage a folder's tensors, in place."""

    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        stored = load_file(path)
        change(stored)
        save_file(stored, path, metadata={"format": "pt"})

    return damage


def replace_model(name: str, **sizes: int) -> Callable[[Path], None]:
    """Replace a folder with another model for the same target."""
    schemes = {"ct": "ct.int4_g32", "ort": "ort.matmulnbits", "gguf": "gguf.q4_0"}

    def damage(folder: Path) -> None:
        shutil.rmtree(folder)
        other_model = Decoder(attrs.evolve(model().config, **sizes))
        initialize(other_model, 0)
        if name == "base":
            save_model(other_model, folder)
        else:
            export(qat(other_model, schemes[name]), folder)

    return damage


@pytest.mark.parametrize("name", ["base", "ct", "ort", "gguf"])
def test_tokens_outside_the_vocabulary_are_refused(
    name: str, error_for: Callable[..., str]
) -> None:
    """Before any runtime looks up a missing token."""
    error = error_for(name, replace_model(name, vocab_size=64))
    assert "tokens must be 0 to 63 for " in error


@pytest.mark.parametrize("name", ["base", "ct", "ort", "gguf"])
def test_text_longer_than_the_model_supports_is_refused(
    name: str, error_for: Callable[..., str]
) -> None:
    """Whether its runtime would fail or continue past the trained length."""
    short = replace_model(name, max_position_embeddings=31)
    assert "sequence_length must be at most 31" in error_for(name, short)


def test_decoding_past_the_models_length_is_refused(error_for: Callable[..., str]) -> None:
    """Prompt and continuation count together."""
    short = replace_model("ort", max_position_embeddings=35)
    error = error_for("ort", short, prefill_tokens=32)
    assert "prefill_tokens and decode_tokens must be at most 35" in error


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("base", "has 'model.norm.weight' with a NaN"),
        ("ct", "gives a loss of NaN; check its weights"),
    ],
)
def test_a_nan_loss_is_refused(name: str, message: str, error_for: Callable[..., str]) -> None:
    """With the tensor's name where possible, and before the timing."""

    def spoil(stored: dict[str, Tensor]) -> None:
        stored["model.norm.weight"][0] = torch.nan

    assert message in error_for(name, damage_tensors(spoil))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda stored: stored.pop(f"{UP}.weight_packed"), "weight_packed"),
        (lambda stored: stored.pop(f"{UP}.weight_scale"), f"{UP}.weight_scale is missing"),
        (lambda stored: stored.update(more=torch.ones(2)), "more is unexpected"),
    ],
)
def test_tensors_that_transformers_would_initialize_randomly_are_reported(
    change: Callable[[dict[str, Tensor]], Any], message: str, error_for: Callable[..., str]
) -> None:
    """Otherwise it would silently measure random weights."""
    assert message in error_for("ct", damage_tensors(change))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("ct", lambda _: [], "Expected `object`, got `array`"),
        ("base", lambda _: [], "Expected `object`, got `array`"),
        (
            "ct",
            lambda c: {**c, "quantization_config": 5},
            "must be 'compressed-tensors', got 5",
        ),
        (
            "ct",
            lambda c: {**c, "quantization_config": {"quant_method": "bitsandbytes"}},
            "must be 'compressed-tensors', got 'bitsandbytes'",
        ),
        (
            "ct",
            lambda c: {**c, "quantization_config": {"quant_method": METHOD}},
            "lacks the weights' num_bits",
        ),
        ("ct", lambda c: {**c, "dtype": "floatx", "torch_dtype": "floatx"}, "got 'floatx'"),
        ("ct", lambda c: {**c, "num_hidden_layers": 3}, "more are missing; export it again"),
        ("ct", lambda c: {**c, "intermediate_size": 96}, "are mismatched; export it again"),
        ("ct", lambda c: {**c, "num_attention_heads": "two"}, "transformers cannot read it"),
    ],
)
def test_a_damaged_config_is_named(
    name: str, change: Callable[[Any], Any], message: str, error_for: Callable[..., str]
) -> None:
    """With the problem in it."""
    assert message in error_for(name, damage_config(change))


@pytest.mark.parametrize("change", [lambda _: [], lambda _: {"model_type": "llama"}])
def test_onnxruntime_needs_only_the_graph(
    change: Callable[[Any], Any], work: Path, tmp_path: Path
) -> None:
    """The graph defines the decoder completely; another model's config.json changes nothing."""
    folder = shutil.copytree(work / "ort", tmp_path / "ort")
    expected = open_runtime(folder, "ort").logits(torch.arange(8).view(1, 8))
    damage_config(change)(folder)
    assert torch.equal(open_runtime(folder, "ort").logits(torch.arange(8).view(1, 8)), expected)


def test_messages_of_runtimes_are_silenced(
    error_for: Callable[..., str], work: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Onnxruntime's about a broken file, and transformers' progress bars on a good one."""

    def break_graph(folder: Path) -> None:
        onnx_model = onnx.load(folder / "model.onnx", load_external_data=False)
        onnx_model.graph.node[0].op_type = "NoSuchOperator"
        onnx.save(onnx_model, folder / "model.onnx")

    assert "onnxruntime cannot read it" in error_for("ort", break_graph)
    open_runtime(work / "ct", "ct").logits(torch.zeros(1, 4, dtype=torch.int64))
    assert capfd.readouterr().err == ""


def test_a_runtime_failure_names_the_folder(work: Path) -> None:
    """Onnxruntime fails beyond the positions of its tables."""
    runtime = open_runtime(work / "ort", "ort")
    with pytest.raises(ExportError, match="ort: onnxruntime cannot run it"):
        runtime.logits(torch.full((1, 4), VOCABULARY))
