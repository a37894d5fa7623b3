"""Overrides of a run file on the command line, and the messages about unknown names."""

from importlib import import_module
from pathlib import Path

import pytest

COMMANDS = [
    *(("ms_align", name) for name in ("sft", "reward", "dpo", "kto", "gkd", "ppo", "grpo", "rloo")),
    *(("ms_align", name) for name in ("generate", "evaluate")),
    *(("ms_compress", name) for name in ("qat", "prune", "distill", "quantize", "evaluate")),
    ("ms_compress", "compare-schemes"),
    *(("ms_parallel", name) for name in ("train", "inspect", "plan")),
]
"""Commands that take a run file."""


def error_line(
    package: str, *arguments: str | Path, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    """Run a command in this process; return its exit code and its line on standard error."""
    try:
        code = import_module(f"{package}.cli").main([str(argument) for argument in arguments])
    except SystemExit as stop:
        code = int(str(stop.code))
    return code, capsys.readouterr().err


@pytest.mark.parametrize(("package", "command"), COMMANDS)
def test_an_override_may_precede_or_follow_other_options(
    package: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The unknown key of each override shows that the override was applied."""
    run_file = tmp_path / "run.toml"
    run_file.write_text("")
    cluster = ["--cluster", run_file] if command == "plan" else []
    for arguments in (
        [run_file, "lerning_rat=1", *cluster],
        [run_file, *cluster, "--json", "lerning_rat=1"],
        [run_file, *cluster, "--set", "lerning_rat=1", "--json"],
        ["--set", "lerning_rat=1", *cluster, run_file],
    ):
        code, line = error_line(package, command, *arguments, capsys=capsys)
        assert code == 2
        assert "unknown key 'lerning_rat'" in line
    code, line = error_line(package, command, run_file, *cluster, "--json", "lr", capsys=capsys)
    assert code == 2
    assert "override 'lr' sets no value; write NAME=VALUE" in line


def test_the_last_of_several_overrides_of_a_key_wins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both spellings are applied in the order of the command line."""
    run_file = tmp_path / "run.toml"
    run_file.write_text('model = "llama"\ndataset = "stdlib"\nsteps = 1\n')
    for words, value in (
        (["--set", "batch_size=-1", "batch_size=-2"], "-2"),
        (["batch_size=-2", "--set", "batch_size=-1"], "-1"),
    ):
        code, line = error_line("ms_parallel", "inspect", run_file, *words, capsys=capsys)
        assert code == 2
        assert f"got {value}\n" in line


def test_overrides_reach_the_rules_of_ms_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They follow the rule file; a folder of the corpus may hold an equals sign."""
    corpus = tmp_path / "lang=en"
    corpus.mkdir()
    (corpus / "a.txt").write_text("one two three")
    rules = tmp_path / "rules.toml"
    rules.write_text("[unicode]\n")
    command = ["clean", corpus, rules]
    code, line = error_line("ms_data", *command, "unicode.frm=x", "--out", "o", capsys=capsys)
    assert code == 2
    assert "unknown key 'frm'; did you mean 'form'?" in line
    out = tmp_path / "cleaned"
    code, _ = error_line(
        "ms_data", *command, "unicode.form=NFKC", "--out", out, "words=plain", capsys=capsys
    )
    assert code == 0


@pytest.mark.parametrize(
    ("package", "words", "suggestion"),
    [
        ("ms_parallel", ["train", "run.toml", "--sett", "a=1"], "--set"),
        ("ms_profile", ["report", "traces", "--titel", "x"], "--title"),
        ("ms_kernels", ["bench", "--devise", "cpu"], "--device"),
        ("ms_data", ["build", "corpus", "--output_dir", "shards"], "--out"),  # --tokenizer missing
    ],
)
def test_an_unknown_option_is_refused_with_the_nearest_one(
    package: str, words: list[str], suggestion: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line names the unknown option as well."""
    code, line = error_line(package, *words, capsys=capsys)
    assert code == 2
    option = next(word for word in words if word.startswith("--"))
    assert f"unknown option {option}; did you mean {suggestion}?" in line


@pytest.mark.parametrize(
    ("command", "name", "suggestion"),
    [
        ("sft", "max_steps", "steps"),
        ("sft", "lora_alpha", "lora.alpha"),
        ("dpo", "per_device_train_batch_size", "microbatch_size"),
        ("ppo", "tensor_parallel_size", "layout.tensor"),
        ("grpo", "num_iterations", "epochs"),
    ],
)
def test_a_key_of_another_tool_is_refused_with_its_name_here(
    command: str, name: str, suggestion: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """TRL, vLLM, Megatron-LM and lm-evaluation-harness have other names for these."""
    run_file = tmp_path / "run.toml"
    run_file.write_text(f"{name} = 1\n")
    code, line = error_line("ms_align", command, run_file, capsys=capsys)
    assert code == 2
    assert f"unknown key {name!r}; did you mean {suggestion!r}?" in line
