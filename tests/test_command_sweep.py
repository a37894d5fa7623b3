"""Every option of every command refuses a wrong value with one line, or runs."""

import argparse
import contextlib
import inspect
import io
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("torch")

LIMIT_S = 60
"""Time limit of a call."""
WRONG = ("nonsense", "", "-1", "0", "nan", "1e400", "9" * 23, "missing/file", "[", "x" * 5000)
ARGUMENTS = {
    "ms_data tokenizer": ["corpus", "--out", "out/tokenizer.json"],
    "ms_data build": ["corpus", "--tokenizer", "tokenizer.json", "--out", "out/shards"],
    "ms_data inspect": ["shards"],
    "ms_data verify": ["shards"],
    "ms_data clean": ["corpus", "rules.toml", "--out", "out/cleaned"],
    "ms_data dedup": ["corpus", "--out", "out/unique"],
    "ms_data import": ["shards", "--tokenizer", "tokenizer.json", "--out", "out/imported"],
    "ms_data export": ["shards", "--format", "parquet", "--out", "out/exported"],
    "ms_data stats": ["cleaned", "--out", "out/stats.html"],
    "ms_data init": ["clean"],
    "ms_kernels list": [],
    "ms_kernels explain": ["rms_norm"],
    "ms_kernels build": ["--target", "nonsense", "--out", "out/library"],
    "ms_parallel convert": ["missing.toml"],
    "ms_parallel explain": ["data=2", "llama"],
    "ms_parallel generate": ["missing", "--prompt", "a"],
    "ms_parallel init": [],
    "ms_parallel inspect": ["run.toml"],
    "ms_parallel plan": ["missing.toml", "--cluster", "missing.toml"],
    "ms_parallel prove": ["missing"],
    "ms_parallel schedule": ["1f1b"],
    "ms_parallel train": ["missing.toml"],
    "ms_align init": ["sft"],
    "ms_align sft": ["missing.toml"],
    "ms_align generate": ["missing.toml"],
    "ms_compress qat": ["missing.toml"],
    "ms_compress export": ["missing", "--scheme", "int8", "--out", "out/exported"],
    "ms_compress import": ["missing", "--out", "out/imported"],
    "ms_compress init": ["qat"],
    "ms_profile report": ["missing"],
    "ms_profile memory": ["missing"],
    "ms_profile compare": ["missing", "missing"],
    "ms_profile logs": ["logs"],
    "ms_profile track": ["logs", "--to", "csv"],
    "ms_profile doctor": [],
    "ms_profile run": ["--train-script", "missing.py", "--output-dir", "out/run"],
}
"""Arguments of each command without wrong values; the inputs that `inputs` writes exist."""


def calls_of(parser: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> Iterator[list[str]]:
    """Yield the command line of each command and wrong value, from the parser's definition."""
    subparsers = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    for action in subparsers:
        for name, subparser in action.choices.items():
            yield from calls_of(subparser, (*words, name))
    if subparsers or " ".join((parser.prog.split()[0].replace("-", "_"), *words)) not in ARGUMENTS:
        return
    arguments = ARGUMENTS[" ".join((parser.prog.split()[0].replace("-", "_"), *words))]
    for action in parser._actions:
        if action.option_strings and action.nargs != 0:
            option = action.option_strings[-1]
            yield from ([*words, *arguments, option, value] for value in WRONG)


def parser_of(package: str) -> argparse.ArgumentParser:
    """Build the command's parser with all subcommands."""
    make = import_module(f"{package}.cli")._parser
    parameters = inspect.signature(make).parameters
    if "with_epilog" in parameters:
        return make(with_epilog=False)
    return make([]) if parameters else make()


def run(main: Callable[[list[str]], int], arguments: list[str]) -> tuple[str, str]:
    """Run a command in a forked process; return its exit code and what it wrote to stderr."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reader)
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LIMIT_S)
        errors, code = io.StringIO(), "raised"
        try:
            with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
                code = str(main(arguments))
        except SystemExit as error:
            code = str(error.code)
        except BaseException as error:
            errors.write(repr(error))
        finally:
            os.write(writer, json.dumps([code, errors.getvalue()[-2000:]]).encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        output = file.read()
    os.waitpid(process, 0)
    code, errors_text = json.loads(output) if output else ("killed by a signal or hung", "")
    return code, errors_text


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the inputs that `ARGUMENTS` names."""
    from ms_data.cli import main as ms_data
    from ms_parallel.cli import main as ms_parallel

    monkeypatch.chdir(tmp_path)
    for name in ("corpus", "logs"):
        Path(name).mkdir()
    for number in range(3):
        Path("corpus", f"{number}.txt").write_text(f"Text {number} of a few words.\n" * 5)
    Path("logs", "events.jsonl").write_text('{"kind": "step", "step": 1, "loss": 1.5}\n')
    for command in (
        ["tokenizer", "corpus", "--vocab-size", "300", "--out", "tokenizer.json"],
        ["build", "corpus", "--tokenizer", "tokenizer.json", "--out", "shards"],
        ["init", "clean", "--out", "rules.toml"],
        ["clean", "corpus", "rules.toml", "--out", "cleaned"],
    ):
        assert ms_data(command) == 0
    assert ms_parallel(["init", "--out", "run.toml"]) == 0
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    "package", ["ms_align", "ms_compress", "ms_data", "ms_kernels", "ms_parallel", "ms_profile"]
)
def test_wrong_values_of_options_give_one_line(package: str, inputs: Path) -> None:
    """Bad input exits with 2 and one line; nothing ends in a traceback or hangs."""
    module = import_module(package)
    for name in module.__all__:  # so that each forked process finds them imported
        getattr(module, name)
    main, problems, count = import_module(f"{package}.cli").main, [], 0
    for arguments in calls_of(parser_of(package)):
        shutil.rmtree("out", ignore_errors=True)
        Path("out").mkdir()
        code, errors = run(main, arguments)
        lines = [line for line in errors.splitlines() if line.strip()]
        count += 1
        if code not in ("0", "1", "2") or "Traceback" in errors or (code == "2" and len(lines) > 1):
            problems.append(f"{' '.join(arguments)[:100]}: {code}: {errors[-200:]}")
    assert problems == []
    assert count >= 10
