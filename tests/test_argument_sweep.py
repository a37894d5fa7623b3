"""Every public callable refuses arguments of wrong types with a one-line error of its package."""

import ast
import inspect
import itertools
import json
import os
import signal
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
NAMES: dict[str, list[str]] = tomllib.loads((ROOT / "tests" / "public_names.toml").read_text())
PACKAGES = sorted({module.partition(".")[0] for module in NAMES})
QUICK = ("ms_kernels",)
"""Packages whose calls take about a second each."""
LIMIT_S = 20
"""Time limit of a call."""
NUMBERS = itertools.count()
WRONG: dict[str, Any] = {
    "None": None,
    "text": "nonsense",
    "empty list": [],
    "list": ["a"],
    "negative number": -1,
    "tensor": torch.zeros(2, 3),
    "missing path": Path("missing/file"),
    "table": {"a": 1},
    "object": object(),
}
FIXED = {
    "ms_profile.Kind": "an enumeration of Python",
    "ms_profile.Trace": "a result of read_trace",
    "ms_profile.LinkMatrix": "a result of measure_links",
    "ms_profile.follow_events": "waits for events of a folder that does not exist yet",
    "ms_parallel.report_error": "formats any exception",
    "ms_parallel.schedules.Kind": "an enumeration of Python",
    "ms_kernels.explain": "takes the arguments of any operator",
    "ms_align.AdaptedModel.forward": "passes its arguments to the model",
    "ms_align.RewardModel.forward": "passes its tokens to the model",
}
"""Callables to skip, with the reason."""
FIXED_MODULES = {
    "ms_parallel.models": "modules, whose configuration has been checked",
    "ms_parallel.operators": "operators in the forward pass of a module",
}
"""Modules to skip, with the reason."""
TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 300,
}


class HangError(BaseException):
    """A call took longer than its limit; not an Exception, so that no package catches it."""


def tiny_model() -> torch.nn.Module:
    """A small llama with random weights."""
    from ms_parallel.models import architecture, build_model
    from ms_parallel.weights import initialize

    model = build_model(architecture("llama", TINY))
    initialize(model, seed=0)
    return model


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus, its tokenizer and shards, and a model folder."""
    from ms_data import build, train_tokenizer
    from ms_parallel import save_model

    folder = tmp_path_factory.mktemp("inputs")
    lines = [json.dumps({"text": f"what is {n}? it is {n}."}) + "\n" for n in range(200)]
    (folder / "texts.jsonl").write_text("".join(lines))
    train_tokenizer(folder / "texts.jsonl", vocab_size=300, out=folder / "tokenizer.json")
    build(
        folder / "texts.jsonl",
        tokenizer=folder / "tokenizer.json",
        out=folder / "shards",
        held_out_fraction=0.2,
    )
    (folder / "rules.toml").write_text("[unicode]\n")
    save_model(tiny_model(), folder / "llama")  # type: ignore[arg-type]
    return folder


def valid(function: str, name: str, inputs: Path) -> Any:
    """A plausible value of a required parameter, by its name; None for an unknown name."""
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    texts, shards, tokenizer = (inputs / n for n in ("texts.jsonl", "shards", "tokenizer.json"))
    match function, name:
        case _, "out":
            return Path(f"out-{next(NUMBERS)}")
        case "ms_data.export_dataset", "target":
            return "parquet"
        case "ms_data.inspect" | "ms_data.verify", "folder":
            return shards
    match name:
        case "model" | "teacher" | "body":
            return tiny_model()
        case "folder":
            return inputs / "llama"
        case "corpus":
            return texts
        case "options":
            import ms_compress

            return ms_compress.Tuning(steps=1, batch_size=1, sequence_length=4)
        case "sampling":
            import ms_align

            return ms_align.Sampling(max_new_tokens=2)
    values: dict[str, Any] = {
        "path": Path("out"),
        "tokenizer": tokenizer,
        "rules": inputs / "rules.toml",
        "sources": shards,
        "shards": shards,
        "source": shards,
        "text": tokens,
        "tokens": tokens,
        "batches": [tokens],
        "batch": {"tokens": tokens},
        "prompts": [[1, 2]],
        "messages": [{"role": "user", "content": "a"}],
        "student": torch.zeros(1, 4),
        "scheme_name": "ct.w8a8",
        "name": "ct.w8a8",
        "target": "ct",
        "pattern": "2:4",
        "model_arch": "llama",
        "device": "cpu",
        "dtype": torch.float32,
        "num_bits": 4,
        "vocab_size": 300,
        "sequence_length": 16,
        "batch_size": 2,
        "capacity": 32,
        "window": 8,
        "rows": 2,
    }
    return values.get(name)


def instances(package: str, inputs: Path) -> dict[str, Callable[[], Any]]:
    """Objects whose methods are called, by name."""
    module: Any = import_module(package)
    match package:
        case "ms_align":
            return {
                "LocalEngine": lambda: module.LocalEngine(tiny_model()),
                "LocalGenerator": lambda: module.LocalGenerator(tiny_model()),
                "RewardModel": lambda: module.RewardModel(tiny_model()),
            }
        case "ms_parallel":
            return {"Engine": lambda: module.Engine(tiny_model(), module.Layout(), device="cpu")}
        case "ms_data":
            shards = {"sequence_length": 16, "batch_size": 2}
            content = (inputs / "tokenizer.json").read_bytes()
            return {
                "Mixture": lambda: module.Mixture(["a", "b"]),
                "BestFitPacker": lambda: module.BestFitPacker(32),
                "Tokenizer": lambda: module.Tokenizer(content),
                "ChatTemplate": lambda: module.ChatTemplate("{{ messages }}"),
                "TokenStream": lambda: module.TokenStream(inputs / "shards", **shards),
            }
        case "ms_profile":
            return {
                "EventLog": lambda: module.EventLog(Path("log"), rank=0, world_size=1),
                "Recorder": lambda: module.Recorder(Path("ring"), rank=0),
            }
    return {}


def callables(package: str, inputs: Path) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the public functions, classes and methods of a package."""
    for module_name, names in NAMES.items():
        if module_name.partition(".")[0] != package or module_name in FIXED_MODULES:
            continue
        module = import_module(module_name)
        for name in names:
            item = getattr(module, name)
            is_class = isinstance(item, type)
            if not callable(item) or getattr(item, "_is_protocol", False):
                continue
            if is_class and issubclass(item, (BaseException, dict)):  # TypedDict is a dict
                continue
            yield f"{module_name}.{name}", item
    for name, create in instances(package, inputs).items():
        item = create()
        for method_name in dir(type(item)):
            method = getattr(type(item), method_name)
            defined_here = (getattr(method, "__module__", None) or "").partition(".")[0] in PACKAGES
            if method_name.startswith("_") or not callable(method) or not defined_here:
                continue
            if method_name not in ("close", "stop"):
                yield f"{package}.{name}.{method_name}", getattr(item, method_name)


@cache
def raises(file: str, line: int) -> bool:
    """Whether a line of a file is in a `raise` statement."""
    nodes = ast.walk(ast.parse(Path(file).read_text()))
    return any(
        isinstance(node, ast.Raise) and node.lineno <= line <= (node.end_lineno or 0)
        for node in nodes
    )


def is_ours(error: BaseException) -> bool:
    """Whether a package raised the error itself: its own class, or a TypeError or ValueError."""
    if type(error).__module__.partition(".")[0] in PACKAGES:
        return True
    traceback = error.__traceback__
    assert traceback is not None
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    file = traceback.tb_frame.f_code.co_filename
    in_package = any(f"/{package}/" in file for package in PACKAGES)
    return (
        isinstance(error, TypeError | ValueError)
        and in_package
        and raises(file, traceback.tb_lineno)
    )


def problem(call: Callable[[], Any]) -> str:
    """Call; return the defect of its error, or "" if it succeeds or the error is good."""
    signal.alarm(LIMIT_S)
    try:
        result = call()
        if inspect.isgenerator(result):
            next(result, None)
        elif hasattr(result, "__enter__") and type(result).__name__.startswith("_Generator"):
            with result:
                pass
    except HangError:
        return f"it takes more than {LIMIT_S} s"
    except Exception as error:
        if not is_ours(error):
            return f"{type(error).__name__}: {str(error)[:200]!r}"
        return f"several lines: {str(error)[:200]!r}" if "\n" in str(error) else ""
    finally:
        signal.alarm(0)
    return ""


def sweep(name: str, function: Callable[..., Any], inputs: Path) -> tuple[int, list[str]]:
    """Call with each wrong value of each parameter; return the number of calls and the problems."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # a class of another library, such as msgspec's
        return 0, []
    count, problems = 0, []
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    for parameter in named:
        for label, value in WRONG.items():
            arguments = {
                p.name: valid(name, p.name, inputs)
                for p in named
                if p.default is p.empty and p is not parameter
            } | {parameter.name: value}
            positional = [arguments.pop(p.name) for p in named if p.kind is p.POSITIONAL_ONLY]
            count += 1
            if line := problem(lambda: function(*positional, **arguments)):  # noqa: B023
                problems.append(f"{name}({parameter.name}={label}): {line}")
    return count, problems


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "package",
    [p if p in QUICK else pytest.param(p, marks=pytest.mark.slow) for p in PACKAGES],
)
def test_every_public_callable_refuses_wrong_arguments_in_one_line(
    package: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong values of every parameter, the others being valid."""

    def stop(_: int, __: FrameType | None) -> None:
        raise HangError

    monkeypatch.chdir(tmp_path)  # some calls write to a folder named by a wrong value
    previous = signal.signal(signal.SIGALRM, stop)
    count, problems = 0, []
    try:
        for name, function in callables(package, inputs):
            if name not in FIXED:
                calls, lines = sweep(name, function, inputs)
                count, problems = count + calls, problems + lines
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert problems == []
    assert count > 800
    assert os.getcwd() == str(tmp_path)
