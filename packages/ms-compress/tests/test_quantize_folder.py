"""`ms-compress quantize FOLDER --scheme NAME --out DIR` without a run file."""

import json
from pathlib import Path

import msgspec
import pytest
from folders import write_model, write_run, write_shards

from ms_compress import SchemeError
from ms_compress.cli import main
from ms_compress.report.schemes import SchemeComparison
from ms_compress.targets.footprint import footprint
from ms_compress.targets.rules import scheme


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder with a file of tokens next to it."""
    write_run(tmp_path)
    return tmp_path / "model"


def test_a_model_folder_is_quantized_with_one_command(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It prints size, quality and how to serve, and the target of the scheme may be left out."""
    out = tmp_path / "out"
    arguments = ["--scheme", "fp8_dynamic", "--out", str(out), "--verify"]
    assert main(["quantize", str(model), *arguments]) == 0
    written, serve, quality = capsys.readouterr().out.splitlines()
    assert written.startswith(f"{out}: ct.fp8_dynamic, ")
    assert written.endswith(" MB, verified in its runtime")
    assert serve == f"serve: vllm serve {out}"
    assert quality.startswith("quality: KL ")
    assert "set dataset" in quality
    assert footprint(out).scheme == "fp8-bit rows"
    assert footprint(out).weights == footprint(model).weights


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_calibrated_input_scales_need_a_dataset(
    name: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without one the command names schemes that need none; with one it measures on it."""
    arguments = ["quantize", str(model), "--scheme", name, "--out", str(tmp_path / "out")]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert "set dataset" in error
    assert "ct.fp8_dynamic" in error
    assert error.count("\n") == 1
    assert main([*arguments, "--dataset", str(tmp_path / "missing.json")]) == 2
    assert "dataset must exist" in capsys.readouterr().err
    tokens = tmp_path / "tokens.json"
    sizes = ["--set", "tuning.sequence_length=32", "--set", "rows=16"]
    settings = [*sizes, "--dataset", str(tokens), "--verify", "--json"]
    assert main([*arguments, *settings]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert 0 < facts["kl"] < 0.2
    assert 0.5 < facts["top1_agreement"] <= 1
    assert facts["verified"] is True


def test_texts_calibrate_and_the_card_states_recipe_and_quality(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a text file, or shards with a held-out split; with license, tokenizer and commands."""
    write_shards(tmp_path)
    model = write_model(tmp_path / "model")
    for name in ("tokenizer.json", "LICENSE"):
        (model / name).write_bytes((tmp_path / "tokenizer.json").read_bytes())
    (model / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A base model\n")
    sizes = ["--set", "tuning.sequence_length=32", "--set", "rows=4"]
    sources = {
        tmp_path / "texts" / "1.txt": "after the calibration rows",
        tmp_path / "texts": "after the calibration rows",
        tmp_path / "shards": "held-out split",
    }
    for number, (dataset, source) in enumerate(sources.items()):
        out = tmp_path / f"out{number}"
        arguments = ["--scheme", "int4_g32", "--method", "awq", "--dataset", str(dataset)]
        assert main(["quantize", str(model), *arguments, "--out", str(out), *sizes]) == 0
        quality = capsys.readouterr().out.splitlines()[-1]
        assert quality.startswith("quality: perplexity ")
        assert source in quality
        card = (out / "README.md").read_text()
        assert card.startswith("---\nlicense: apache-2.0\ntags:\n- quantized\n- ct.int4_g32\n---")
        assert quality.removeprefix("quality: ") in card
        for line in ("vllm serve out", "method = 'awq'", "tuning.sequence_length = 32"):
            assert line in card
        assert (out / "LICENSE").is_file()
        assert (out / "tokenizer.json").is_file()


def test_quantized_weights_and_empty_texts_are_refused_in_one_line(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, the reason, and no output folder."""
    out = tmp_path / "out"
    assert main(["quantize", str(model), "--scheme", "mxfp4a16", "--out", str(out)]) == 0
    again = tmp_path / "again"
    assert main(["quantize", str(out), "--scheme", "fp8_dynamic", "--out", str(again)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "must have float weights, got weights quantized by 'compressed-tensors'" in error
    write_shards(tmp_path)
    base = write_model(tmp_path / "base")
    (base / "tokenizer.json").write_bytes((tmp_path / "tokenizer.json").read_bytes())
    (tmp_path / "empty.txt").write_text("")
    arguments = ["--scheme", "int4_g32", "--method", "gptq", "--out", str(again)]
    assert main(["quantize", str(base), *arguments, "--dataset", str(tmp_path / "empty.txt")]) == 2
    assert "empty.txt is empty" in capsys.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.glob("again*"))


def test_schemes_are_compared_in_a_table_and_a_picture(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every valid pair; the page has no script and reads nothing from a network."""
    out = tmp_path / "comparison"
    pairs = ["--schemes", "w8a8,int4_g32", "--methods", "rtn,smoothquant"]
    sizes = ["--set", "tuning.sequence_length=32", "--set", "rows=8"]
    dataset = ["--dataset", str(tmp_path / "tokens.json")]
    command = ["compare-schemes", str(model), *pairs, "--out", str(out), *dataset, *sizes]
    assert main([*command, "--json"]) == 0
    comparison = msgspec.json.decode((out / "schemes.json").read_bytes(), type=SchemeComparison)
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((out / "schemes.json").read_text())
    names = [(result.scheme, result.method) for result in comparison.results]
    assert names == [("ct.w8a8", "rtn"), ("ct.w8a8", "smoothquant"), ("ct.int4_g32", "rtn")]
    assert comparison.results[0].kl < comparison.results[2].kl
    assert comparison.results[0].size_bytes > comparison.results[2].size_bytes
    assert 2 in comparison.best()
    page = (out / "schemes.html").read_text()
    assert page.count("<circle") == 3
    assert not any(text in page for text in ("<script", "http:", "https:", "src="))
    assert main(command) == 0
    assert "this run is finished" in capsys.readouterr().out
    assert main(["compare-schemes", str(model), "--schemes", "w8a9", "--out", f"{out}2"]) == 2
    assert "unknown scheme 'w8a9'; did you mean 'w8a8'?" in capsys.readouterr().err


def test_options_override_a_run_file(model: Path, tmp_path: Path) -> None:
    """`--scheme` and `--out` are the keys of the run file."""
    file, out = tmp_path / "run.toml", tmp_path / "elsewhere"
    arguments = ["--scheme", "ct.mxfp4a16", "--out", str(out)]
    assert main(["quantize", str(file), *arguments]) == 0
    assert footprint(out).scheme == "fp4-bit g32"


def test_a_folder_without_a_scheme_is_rejected_in_one_line(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and the missing keys are named."""
    assert main(["quantize", str(model)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "scheme" in error


def test_scheme_names_do_not_need_their_target() -> None:
    """Schemes with another group size too."""
    assert scheme("q4_0") == scheme("gguf.q4_0")
    assert scheme("fp8_dynamic") == scheme("ct.fp8_dynamic")
    assert scheme("w4a16_asym_g128") == scheme("ct.w4a16_asym_g128")
    with pytest.raises(SchemeError, match=r"unknown scheme 'fp8_dinamic'.*'fp8_dynamic'"):
        scheme("fp8_dinamic")
