"""The command: real folders in, real folders out; bad input is one line and exit code 2."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from models import decoder, tokens

from ms_compress.cli import main
from ms_parallel import load_model, save_model


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """A saved model, tokens, and a run file for both."""
    save_model(decoder(), tmp_path / "model")
    (tmp_path / "tokens.json").write_text(json.dumps(tokens(16, 33).tolist()))
    (tmp_path / "strange.json").write_text(json.dumps([[0, 9999] * 264]))
    file = tmp_path / "run.toml"
    file.write_text(
        f'model = "{tmp_path}/model"\noutput_dir = "{tmp_path}/out"\n'
        f'dataset = "{tmp_path}/tokens.json"\nrows = 16\n'
        "[tuning]\nsteps = 3\nbatch_size = 4\nsequence_length = 32\n"
    )
    return file


@pytest.mark.parametrize("start", ["nearest", "gptq"])
def test_qat_trains_exports_and_verifies(
    start: str, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One command from a float model to a folder that onnxruntime agrees with."""
    arguments = ["--set", "scheme=ort.matmulnbits", "--set", "verify=true"]
    arguments += ["--set", f"start={start}", "--set", f"teacher={run_file.parent}/model"]
    arguments += ["--set", "tuning.hidden_weight=20"]
    assert main(["qat", str(run_file), *arguments]) == 0
    assert "verified in its runtime" in capsys.readouterr().out
    assert (run_file.parent / "out" / "model.onnx").is_file()


@pytest.mark.parametrize("fitted", ["false", "true"])
@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_quantize_exports(method: str, fitted: str, run_file: Path) -> None:
    """Without training."""
    arguments = ["--set", "scheme=ct.int4_g32", "--set", f"method={method}"]
    arguments += ["--set", f"fit_scales={fitted}", "--set", f"by_use={fitted}"]
    arguments += ["--set", f"by_loss={fitted}"]
    assert main(["quantize", str(run_file), *arguments]) == 0
    assert (run_file.parent / "out" / "model.safetensors").is_file()


def test_prune_then_sparse_qat_keeps_zeros(run_file: Path) -> None:
    """What `prune` saved is what `qat` with sparse=true keeps."""
    arguments = ["--set", "pattern=2:4", "--set", "method=wanda"]
    assert main(["prune", str(run_file), *arguments]) == 0
    pruned = load_model(run_file.parent / "out")
    weight = pruned.get_parameter("model.layers.0.mlp.up_proj.weight")
    assert bool(((weight.view(-1, 4) != 0).sum(1) == 2).all())
    more = ["--set", "scheme=ct.int4_g32", "--set", "sparse=true"]
    more += ["--set", f"model={run_file.parent}/out", "--set", f"output_dir={run_file.parent}/q"]
    assert main(["qat", str(run_file), *more]) == 0


@pytest.mark.parametrize("command", ["qat", "prune", "distill"])
def test_a_folder_that_is_there_is_refused_before_any_step(
    command: str, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not after hours of training; what is in it stays."""
    (run_file.parent / "out").mkdir()
    more = {"qat": "scheme=gguf.q4_0", "prune": "pattern=2:4", "distill": "layers=1"}[command]
    assert main([command, str(run_file), "--set", more]) == 2
    error = capsys.readouterr().err
    assert "out exists; remove it" in error
    assert "step" not in error
    assert not list((run_file.parent / "out").iterdir())


def test_distill_saves_a_smaller_student(run_file: Path) -> None:
    """Half the layers and neurons, readable as any model."""
    assert main(["distill", str(run_file), "--set", "layers=1", "--set", "inner=128"]) == 0
    student = load_model(run_file.parent / "out")
    assert student.config.num_hidden_layers == 1
    assert torch.isfinite(student(tokens())).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["scheme=gguf.q4_1"], "did you mean 'gguf.q4_0'"),
        (["scheme=ct.int4_g96"], "groups that fit"),
        (["scheme=ct.int4_g32", "tuning.setps=3"], "did you mean 'steps'"),
        (["scheme=ct.int4_g32", "model=nowhere"], "no config.json"),
        (["scheme=ct.int4_g32", "rows=400"], "tokens, where 400 rows"),
        (["scheme=ct.int4_g32", 'exceptions=["down"]'], "matches no layer"),
        (["scheme=gguf.q4_0", "start=gptq", "head=true"], "leave embeddings and head false"),
        (["scheme=ct.int4_g32", "dataset=strange.json"], "tokens are 0 to 9999, and"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str],
    message: str,
    run_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What, where and the remedy; exit code 2; nothing is written."""
    monkeypatch.chdir(run_file.parent)
    settings = [part for each in arguments for part in ("--set", each)]
    assert main(["qat", str(run_file), *settings]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(run_file.parent.glob("out*"))


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("quantize", ["scheme=ct.int4_g32", "method=gptq"], "are NaN or infinite"),
        ("prune", ["pattern=2:4", "method=wanda"], "are NaN or infinite"),
        ("quantize", ["scheme=ct.int4_g32"], "model.layers.1.mlp.up_proj.weight: 1 of its values"),
        ("export", ["scheme=gguf.q4_0"], "model.layers.1.mlp.up_proj.weight: 1 of its values"),
        ("qat", ["scheme=gguf.q4_0"], "step 0: the loss is nan; look at the model's weights"),
    ],
)
def test_a_model_with_a_nan_is_refused(
    command: str,
    arguments: list[str],
    message: str,
    run_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where it is met: in calibration, in training, or in what is written."""
    broken = load_model(run_file.parent / "model")
    with torch.no_grad():
        broken.get_parameter("model.layers.1.mlp.up_proj.weight")[0, 0] = torch.nan
    save_model(broken, run_file.parent / "broken")
    settings = [*arguments, f"model={run_file.parent}/broken"]
    assert main([command, str(run_file), *(p for each in settings for p in ("--set", each))]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(run_file.parent.glob("out*"))
