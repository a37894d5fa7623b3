"""What is wrong with a folder that is measured is said in one line, before anything is timed."""

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
    """A plain model, its exports for all runtimes that take no build, and a text."""
    folder = tmp_path_factory.mktemp("work")
    write_model(folder / "base")
    write_shards(folder)
    export(qat(model(), "ct.int4_g32"), folder / "ct")
    export(qat(model(), "ort.matmulnbits"), folder / "ort")
    export(qat(model(), "gguf.q4_0"), folder / "gguf")
    return folder


@pytest.fixture
def complaint(work: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What `evaluate` says of a copy of a folder, to which something was done."""

    def of(name: str, damage: Callable[[Path], object] = str, **settings: int) -> str:
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
        *before, text = capfd.readouterr().err.splitlines()
        assert all(line.startswith("row ") for line in before)
        assert str(folder) in text
        return str(text)

    return of


def config(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Damage to a folder's config.json."""

    def damage(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(change(json.loads(path.read_text()))))

    return damage


def tensors(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    """Damage to a folder's tensors, in place."""

    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        found = load_file(path)
        change(found)
        save_file(found, path, metadata={"format": "pt"})

    return damage


def another(name: str, **sizes: int) -> Callable[[Path], None]:
    """Another model in a folder's place, for the same target."""
    schemes = {"ct": "ct.int4_g32", "ort": "ort.matmulnbits", "gguf": "gguf.q4_0"}

    def damage(folder: Path) -> None:
        shutil.rmtree(folder)
        made = Decoder(attrs.evolve(model().config, **sizes))
        initialize(made, 0)
        if name == "base":
            save_model(made, folder)
        else:
            export(qat(made, schemes[name]), folder)

    return damage


@pytest.mark.parametrize("name", ["base", "ct", "ort", "gguf"])
def test_text_of_another_vocabulary_is_refused(name: str, complaint: Callable[..., str]) -> None:
    """Before any runtime looks up what it has not."""
    said = complaint(name, another(name, vocab_size=64))
    assert "tokens must be 0 to 63 for " in said


@pytest.mark.parametrize("name", ["base", "ct", "ort", "gguf"])
def test_text_longer_than_a_model_knows_is_refused(
    name: str, complaint: Callable[..., str]
) -> None:
    """Whether its runtime would fail, or go on beyond what was trained."""
    short = another(name, max_position_embeddings=31)
    assert "sequence_length must be at most 31" in complaint(name, short)


def test_decoding_beyond_what_a_model_knows_is_refused(complaint: Callable[..., str]) -> None:
    """The prompt and what follows it count together."""
    short = another("ort", max_position_embeddings=35)
    said = complaint("ort", short, prefill_tokens=32)
    assert "prefill_tokens and decode_tokens must be at most 35" in said


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("base", "has 'model.norm.weight' with a NaN"),
        ("ct", "gives a loss of NaN; check its weights"),
    ],
)
def test_a_loss_that_is_nan_is_refused(name: str, told: str, complaint: Callable[..., str]) -> None:
    """By the tensor's name, and not after all the timing."""

    def spoil(found: dict[str, Tensor]) -> None:
        found["model.norm.weight"][0] = torch.nan

    assert told in complaint(name, tensors(spoil))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found.pop(f"{UP}.weight_packed"), "weight_packed"),
        (lambda found: found.pop(f"{UP}.weight_scale"), f"{UP}.weight_scale is missing"),
        (lambda found: found.update(more=torch.ones(2)), "more is unexpected"),
    ],
)
def test_tensors_that_transformers_would_draw_at_random_are_missed(
    change: Callable[[dict[str, Tensor]], Any], message: str, complaint: Callable[..., str]
) -> None:
    """It gives figures of them otherwise, and no word."""
    assert message in complaint("ct", tensors(change))


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
    name: str, change: Callable[[Any], Any], message: str, complaint: Callable[..., str]
) -> None:
    """With what is wrong in it."""
    assert message in complaint(name, config(change))


@pytest.mark.parametrize("change", [lambda _: [], lambda _: {"model_type": "llama"}])
def test_onnxruntime_asks_the_graph_alone(
    change: Callable[[Any], Any], work: Path, tmp_path: Path
) -> None:
    """The graph says all that a decoder is run by; another model's config.json changes nothing."""
    folder = shutil.copytree(work / "ort", tmp_path / "ort")
    expected = open_runtime(folder, "ort").logits(torch.arange(8).view(1, 8))
    config(change)(folder)
    assert torch.equal(open_runtime(folder, "ort").logits(torch.arange(8).view(1, 8)), expected)


def test_what_runtimes_say_beside_our_line_is_not_heard(
    complaint: Callable[..., str], work: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither onnxruntime's of a torn file, nor the bars of transformers on a good one."""

    def tear(folder: Path) -> None:
        found = onnx.load(folder / "model.onnx", load_external_data=False)
        found.graph.node[0].op_type = "NoSuchOperator"
        onnx.save(found, folder / "model.onnx")

    assert "onnxruntime cannot read it" in complaint("ort", tear)
    open_runtime(work / "ct", "ct").logits(torch.zeros(1, 4, dtype=torch.int64))
    assert capfd.readouterr().err == ""


def test_a_runtime_that_cannot_run_a_text_says_whose(work: Path) -> None:
    """Beyond the positions of its tables onnxruntime fails."""
    runtime = open_runtime(work / "ort", "ort")
    with pytest.raises(ExportError, match="ort: onnxruntime cannot run it"):
        runtime.logits(torch.full((1, 4), VOCABULARY))
