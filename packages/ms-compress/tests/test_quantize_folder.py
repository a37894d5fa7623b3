"""`ms-compress quantize FOLDER --scheme NAME --out DIR` without a run file."""

import json
from pathlib import Path

import pytest
from folders import write_run

from ms_compress import SchemeError
from ms_compress.cli import main
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
