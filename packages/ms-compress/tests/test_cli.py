"""The commands on real folders; bad input gives one line and exit code 2."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from folders import write_run, write_shards
from models import tokens
from safetensors.torch import load_file, save_file
from torch.optim.optimizer import register_optimizer_step_post_hook

from ms_compress import ConfigError, DataError
from ms_compress.cli import main
from ms_compress.corpus import read_tokens
from ms_compress.evaluation.options import Evaluation
from ms_parallel import load_model


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """A saved model, tokens, and a run file for both."""
    (tmp_path / "strange.json").write_text(json.dumps([[0, 9999] * 264]))
    return write_run(tmp_path)


@pytest.mark.parametrize("start", ["nearest", "gptq"])
def test_qat_trains_exports_and_verifies(
    start: str, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One command from a float model to a folder verified in onnxruntime."""
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
    arguments += ["--set", f"fit_scales={fitted}"]
    if method == "gptq":
        arguments += ["--set", f"act_order={fitted}", "--set", f"by_loss={fitted}"]
    assert main(["quantize", str(run_file), *arguments]) == 0
    assert (run_file.parent / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("command", "settings", "message"),
    [
        ("quantize", "act_order=true", "act_order=true is only used by GPTQ, got method='rtn'"),
        ("quantize", "by_loss=true method=awq", "by_loss=true is only used by GPTQ"),
        ("qat", "tuning.hidden_weight=20", "tuning.hidden_weight is only used with a teacher"),
        ("qat", "learned_scales=false tuning.scale_rate=2", "only used with learned_scales=true"),
        ("prune", "method=gradual retrain=false", "so retrain must be true, got false"),
        ("prune", "method=reap pattern=0.5 ignore=['*.up_proj']", "ignore is only used by methods"),
        ("prune", "tuning.distill_weight=0.5", "tuning.distill_weight is only used with a teacher"),
        ("prune", "tuning.scale_rate=2", "tuning.scale_rate is only used with learned scales"),
    ],
)
def test_a_setting_that_another_one_makes_useless_is_refused(
    command: str, settings: str, message: str, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, before anything is read."""
    required = "pattern=2:4" if command == "prune" else "scheme=ct.int4_g32"
    words = [word for setting in [required, *settings.split()] for word in ("--set", setting)]
    assert main([command, str(run_file), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_prune_then_sparse_qat_keeps_zeros(run_file: Path) -> None:
    """Weights pruned by `prune` stay zero in `qat` with sparse=true."""
    arguments = ["--set", "pattern=2:4", "--set", "method=wanda"]
    assert main(["prune", str(run_file), *arguments]) == 0
    pruned = load_model(run_file.parent / "out")
    weight = pruned.get_parameter("model.layers.0.mlp.up_proj.weight")
    assert bool(((weight.view(-1, 4) != 0).sum(1) == 2).all())
    options = ["--set", "scheme=ct.int4_g32", "--set", "sparse=true"]
    options += ["--set", f"model={run_file.parent}/out", "--set", f"output_dir={run_file.parent}/q"]
    assert main(["qat", str(run_file), *options]) == 0


@pytest.mark.parametrize("command", ["qat", "prune", "distill"])
def test_an_existing_folder_is_refused_before_any_step(
    command: str, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not after hours of training; its contents stay."""
    (run_file.parent / "out").mkdir()
    setting = {"qat": "scheme=gguf.q4_0", "prune": "pattern=2:4", "distill": "layers=1"}[command]
    assert main([command, str(run_file), "--set", setting]) == 2
    error = capsys.readouterr().err
    assert "out exists; remove it" in error
    assert "step" not in error
    assert not list((run_file.parent / "out").iterdir())


def test_distill_saves_a_smaller_student(run_file: Path) -> None:
    """Half the layers and neurons, loadable like any model."""
    assert main(["distill", str(run_file), "--set", "layers=1", "--set", "inner=128"]) == 0
    student = load_model(run_file.parent / "out")
    assert student.config.num_hidden_layers == 1
    assert torch.isfinite(student(tokens())).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["scheme=gguf.q40"], "did you mean 'gguf.q4_0'"),
        (["scheme=ct.int4_g96"], "use a group of"),
        (["scheme=ct.int4_g32", "tuning.setps=3"], "did you mean 'steps'"),
        (["scheme=ct.int4_g32", "model=nowhere"], "no config.json"),
        (["scheme=ct.int4_g32", "rows=400"], "must have at least 400 rows"),
        (["scheme=ct.int4_g32", 'ignore=["down"]'], "matches no layer"),
        (["scheme=gguf.q4_0", "start=gptq", "head=true"], "set embeddings and head to false"),
        (["scheme=ct.int4_g32", "dataset=strange.json"], "got 0 to 9999"),
        (
            ["scheme=ct.int4_g32", "dataset=huge.json"],
            "huge.json: Number out of range - at `$[0][0]`; use",
        ),
        (["scheme=3"], "scheme is 3; use the name of a scheme"),
        (["scheme=[1]"], "scheme is [1]; use the name of a scheme"),
        (["scheme=ct.int4_g32", "model=5"], "model must be a path, got 5"),
        (["scheme=ct.int4_g32", "output_dir=5"], "output_dir must be a path, got 5"),
        (["scheme=ct.int4_g32", "dataset=5"], "dataset must be a path, got 5"),
        (["scheme=ct.int4_g32", "teacher=5"], "teacher must be a path, got 5"),
        (["scheme=ct.int4_g32", "ignore=3"], "ignore is 3; use a list of name patterns"),
        (
            ["scheme=ct.int4_g32", "ignore=[1]"],
            "ignore is [1]; use a list of name patterns",
        ),
        (["scheme=ct.int4_g32", "ignore=down"], "the exception 'down' matches no layer"),
        (["scheme=ct.int4_g32", "tuning=3"], "tuning must be a table of settings, got 3"),
        (["scheme=ct.int4_g32", f"tuning.seed={2**63}"], f"at least 0 and at most {2**63 - 1}"),
        (
            ["scheme=ct.int4_g32", "tuning.batch_size=3000000000"],
            "batch_size must be at most the number of rows, 16",
        ),
        (["scheme=ct.int4_g32", "float_steps=3"], "float_steps must be below tuning.steps=3"),
        (["scheme=ct.int4_g32", "sparse=true"], "needs weights that are zero"),
        (["scheme=ct.int4_g32", "output_dir="], "output_dir must be a path, got ''"),
        (
            ["scheme=ct.int4_g32", "output_dir=/"],
            "output_dir must end in the name of a new folder, got '/'",
        ),
        (
            ["scheme=ct.int4_g32", "output_dir=.."],
            "output_dir must end in the name of a new folder, got '..'",
        ),
        (
            ["scheme=ct.int4_g32", 'output_dir="a\\u0000b"'],
            "output_dir is 'a\\x00b', which contains a NUL; use another path",
        ),
        (
            ["scheme=ct.int4_g32", f"output_dir={'a' * 250}"],
            "whose last part is longer than 240 bytes; use another path",
        ),
        (
            ["scheme=ct.int4_g32", "output_dir=run.toml/x"],
            "output_dir is 'run.toml/x', but run.toml is not a folder; use another path",
        ),
        (
            ["scheme=ct.int4_g32", "output_dir=run.toml/x/y"],
            "output_dir is 'run.toml/x/y', but run.toml is not a folder; use another path",
        ),
        (["scheme=ct.int4_g32", "output_dir=/proc/no/x"], "cannot write /proc/no/x"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str],
    message: str,
    run_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The problem, its place and the fix; exit code 2; no output."""
    monkeypatch.chdir(run_file.parent)
    Path("huge.json").write_text("[[1e400]]")
    settings = [part for setting in arguments for part in ("--set", setting)]
    assert main(["qat", str(run_file), *settings]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ms-compress: ")
    assert message in error
    assert error.count("\n") == 1
    assert not list(run_file.parent.glob("out*"))


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("quantize", ["scheme=ct.int4_g32", "method=gptq"]),
        ("prune", ["pattern=2:4", "method=wanda"]),
        ("quantize", ["scheme=ct.int4_g32"]),
        ("quantize", ["scheme=gguf.q4_0"]),
        ("qat", ["scheme=gguf.q4_0"]),
        ("prune", ["pattern=2:4"]),
        ("prune", ["pattern=2:4", "retrain=false"]),
    ],
)
def test_a_model_with_a_nan_is_refused(
    command: str,
    arguments: list[str],
    run_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The error names the tensor, before calibration, training or an export."""
    broken = Path(shutil.copytree(run_file.parent / "model", run_file.parent / "broken"))
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    settings = [*arguments, f"model={run_file.parent}/broken"]
    assert (
        main([command, str(run_file), *(p for setting in settings for p in ("--set", setting))])
        == 2
    )
    error = capsys.readouterr().err
    assert "'model.layers.1.mlp.up_proj.weight' with a NaN" in error
    assert error.count("\n") == 1
    assert not list(run_file.parent.glob("out*"))


@pytest.mark.parametrize("command", ["qat", "prune"])
def test_weights_that_become_nan_end_training_with_code_1(
    command: str, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even in the last step, which no loss follows; the error names the tensor, with no output."""
    steps = []

    @torch.no_grad()
    def spoil(optimizer: torch.optim.Optimizer, *_: object) -> None:
        steps.append(1)
        if len(steps) == 2:
            optimizer.param_groups[0]["params"][0].view(-1)[0] = torch.nan

    required = ["scheme=ct.int4_g32"] if command == "qat" else ["pattern=2:4"]
    hook = register_optimizer_step_post_hook(spoil)
    try:
        settings = [*required, "tuning.steps=2"]
        words = [part for setting in settings for part in ("--set", setting)]
        assert main([command, str(run_file), *words]) == 1
    finally:
        hook.remove()
    error = capsys.readouterr().err
    assert ": 1 of its values are NaN or infinite" in error
    assert not (run_file.parent / "out").exists()


@pytest.mark.parametrize("pattern", ["[1]", "{a = 1}", "true", "abc"])
def test_an_invalid_pattern_is_refused(
    pattern: str, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For every TOML type."""
    assert main(["prune", str(run_file), "--set", f"pattern={pattern}"]) == 2
    assert "a pattern must be N:M or a sparsity" in capsys.readouterr().err


def test_a_string_is_one_ignore_pattern(run_file: Path) -> None:
    """It is not split into letters."""
    arguments = ["--set", "scheme=ct.int4_g32", "--set", "ignore=*.down_proj"]
    assert main(["quantize", str(run_file), *arguments]) == 0
    config = json.loads((run_file.parent / "out" / "config.json").read_text())
    assert "model.layers.0.mlp.down_proj" in config["quantization_config"]["ignore"]


@pytest.mark.parametrize("command", ["quantize", "qat"])
def test_verify_is_also_a_command_line_option(
    command: str, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--verify` is the same as the setting."""
    assert main([command, str(run_file), "--set", "scheme=ort.matmulnbits", "--verify"]) == 0
    assert "verified in its runtime" in capsys.readouterr().out


def test_export_equals_quantize_with_defaults(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It takes a folder and a scheme, and --verify checks the result in the runtime."""
    model, out = run_file.parent / "model", tmp_path / "exported"
    words = [str(model), "--scheme", "ct.int4_g32", "--out", str(out)]
    assert main(["export", *words, "--verify", "--json"]) == 0
    assert main(["quantize", str(run_file), "scheme=ct.int4_g32"]) == 0
    quantized = run_file.parent / "out" / "model.safetensors"
    assert (out / "model.safetensors").read_bytes() == quantized.read_bytes()
    capsys.readouterr()
    for mistake, message in (
        ([str(tmp_path / "none"), *words[1:]], "model must be a local folder"),
        ([words[0], "--scheme", "gguf.q4_9", *words[3:]], "did you mean 'gguf.q4_"),
        ([*words, "method=gptq"], "unrecognized arguments: method=gptq"),
    ):
        try:
            code = main(["export", *mistake])
        except SystemExit as stop:
            code = int(str(stop.code))
        assert code == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("quantize", ["scheme=ct.int4_g32", "method=gptq", "by_loss=true"]),
        ("qat", ["scheme=ct.int4_g32", "start=gptq"]),
        ("prune", ["pattern=2:4", "method=wanda"]),
    ],
)
def test_calibration_reports_progress(
    command: str, arguments: list[str], run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the first layer to the last."""
    settings = [part for setting in arguments for part in ("--set", setting)]
    assert main([command, str(run_file), *settings]) == 0
    error = capsys.readouterr().err
    assert error.index("layer 0/2") < error.index("layer 2/2")
    assert "s per layer" in error


def test_rows_are_counted_before_reading(tmp_path: Path) -> None:
    """Asking for a billion rows does not read all rows first."""
    shards = write_shards(tmp_path)
    with pytest.raises(DataError, match="must have at least 1000000000 rows of 17 tokens"):
        read_tokens(shards, count=10**9, length=17)
    assert read_tokens(shards, count=3, length=17).shape == (3, 17)


def test_an_excessive_thread_count_is_refused() -> None:
    """A runtime that starts a hundred thousand threads crashes the process."""
    with pytest.raises(
        ConfigError, match=r"threads must be an integer of at least 1 and at most 1024, got 100000"
    ):
        Evaluation(baseline="base", models={}, dataset="shards", threads=100000)
