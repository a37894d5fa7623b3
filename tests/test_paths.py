"""Every path that a user gives goes through the one check, and a new one that does not fails here.

Three doors take paths: settings (attrs classes), arguments of commands, and public functions.
"""

import ast
import importlib
import inspect
from argparse import Action, ArgumentParser, _SubParsersAction
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import attrs
import pytest

from packages import PACKAGES, ROOT, module_of, sources_of

BAD = {
    "a NUL": "a\0b",
    "a lone surrogate": "a\ud800b",
    "an endless name": "x" * 5000,
    "a long name below what is not there": f"not-there/{'x' * 300}",
    "nothing": "",
}
REMEDIES = ("must be a path", "use another path")
"""Words of the one check."""

WORDS = {
    "ms-data": {
        "text_column",
        "end_of_text",
        "today",
        "priority",
        "shard",
        "split",
        "column",
        "workers",
        "begin_of_text",
        "set",
    },
    "ms-kernels": {"operator", "details", "chip", "backend", "device", "dtype", "only", "target"},
    "ms-parallel": {
        *("set", "costs", "model", "layout", "sharding", "schedule", "recompute"),
        *("context_attention", "device", "prompt"),
    },
    "ms-profile": {
        *("metrics", "arguments", "kind", "rank", "title", "backend", "name", "project", "to"),
        "device",
    },
    "ms-align": {"set"},
    "ms-compress": {"scheme", "set"},
}
"""Arguments whose text is no path."""

TEXTS = {
    *(
        "stop_strings",
        "stop_token_ids",
        "layout",
        "target_modules",
        "head",
        "kl_estimator",
        "tests_key",
    ),
    *("offload", "sharding", "save_dtype"),
    *("given", "base", "generator", "task_weights", "tasks", "weighting", "long", "ignore"),
    *("start", "method", "title", "name", "target", "scale_dtype", "text_column", "decay"),
    *("heads", "model_type", "optimizer", "model_config", "learning_rate_decay", "recompute"),
    *("device", "ops", "sample_prompt", "arguments", "metrics", "balance", "runtime"),
    *(
        "loss_type",
        "f_divergence_type",
        "groups",
        "adamw",
        "fused",
        "settings",
        "loss_scale",
        "languages",
        "script",
        "stop_words",
    ),
    *("chinese_script", "keep", "action", "mask", "words", "form", "priority"),
    *("chip", "peak_tflops", "products", "dtype", "product_dtype", "skip_hint"),
}
"""Settings whose text is no path."""

MADE_HERE = {
    *("RunOutput.folder", "Footprint.folder", "TokenizerFiles.path", "Corpus.files"),
    *("Corpus.names", "Corpus.named", "HeldOut.shards", "Result.model_folder", "FoundTraces.files"),
    *("TokenizerSource.path", "Loop.folder", "Loop.result", "TransformersModel.folder"),
    *("SFTTrainer.weights", "ChatTemplate.with_tokens_of", "OpenFile.path"),
    *("Run.corpus", "CheckpointJob.folder", "Processor.folder", "ArrayShard.folder"),
    *("_PlanRequest.shards", "RecordedSteps.folder", "Run.shards"),
}
"""Values that a package makes of paths that were checked, and no user does; and what is a table of
numbers where another class of its package has a path of that name."""

FITTING = {"sequence_length": 8, "batch_size": 1, "vocab_size": 300, "text_column": "text"}
"""Other parameters of functions, which some look at first."""


def parser_of(package: str) -> ArgumentParser:
    """The parser of a package's command."""
    make = importlib.import_module(f"{module_of(package)}.cli")._parser
    names = list(inspect.signature(make).parameters)
    return cast(ArgumentParser, make(**dict.fromkeys(names, ())))


def arguments_of(package: str) -> Iterator[tuple[str, Action]]:
    """Every argument of every subcommand that takes a value, with the subcommand's name."""
    for action in parser_of(package)._actions:
        if isinstance(action, _SubParsersAction):
            for name, command in action.choices.items():
                yield from (
                    (name, each)
                    for each in command._actions
                    if each.nargs != 0 and not each.choices
                )


def takes_a_path(action: Action) -> bool:
    """Whether it goes through one of the three converters of `entry.py`."""
    return str(getattr(action.type, "__module__", "")).endswith(".entry")


@pytest.mark.parametrize("package", PACKAGES)
def test_an_argument_is_a_path_a_number_or_a_known_word(package: str) -> None:
    """A new argument that takes a text is one of these, and says which."""
    unsaid = [
        f"{command} {action.dest}"
        for command, action in arguments_of(package)
        if action.type in (None, str, Path) and action.dest not in WORDS[package]
    ]
    assert unsaid == []


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("package", PACKAGES)
def test_every_path_of_a_command_is_refused_in_one_line(
    package: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and a remedy, before anything is read."""
    main = importlib.import_module(f"{module_of(package)}.cli").main
    tried = 0
    for command, action in arguments_of(package):
        if not takes_a_path(action):
            continue
        first = next(iter(action.option_strings), None)
        before = ["x"] if (command, action.dest) == ("compare", "after") else []
        given = [BAD[kind]] if first is None else [f"{first}={BAD[kind]}"]
        with pytest.raises(SystemExit) as ended:
            main([command, *before, *given])
        said = capsys.readouterr().err
        assert ended.value.code == 2
        assert said.count("\n") == 1, said
        assert any(remedy in said for remedy in (*REMEDIES, "is not valid UTF-8")), said
        assert len(said) < 600
        tried += 1
    assert tried


def attrs_classes(package: str) -> Iterator[type]:
    """The attrs classes of a package that have a field which can hold a text or path."""
    for path, tree in sources_of(package):
        names = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        parts = path.relative_to(ROOT / "packages" / package / "src").with_suffix("").parts
        text = path.read_text()
        if "from attrs import" not in text or not names:
            continue
        module = importlib.import_module(".".join(parts))
        for name in names:
            kind = getattr(module, name, None)
            if isinstance(kind, type) and attrs.has(kind):
                yield kind


def holds_text(attribute: "attrs.Attribute[Any]") -> bool:
    """Whether its annotation lets it hold a text or path."""
    words = str(attribute.type).replace("pathlib.", "").replace("typing.", "")
    if "Callable" in words or "Tensor" in words:
        return False
    return any(word in words for word in ("Path", "str", "Any"))


def text_fields(package: str) -> Iterator[tuple[type, "attrs.Attribute[Any]"]]:
    """Fields of settings that can hold a text, and of other values those that hold a path."""
    for kind in attrs_classes(package):
        fields = [each for each in attrs.fields(cast(Any, kind)) if each.init]
        settings = any(each.validator is not None for each in fields)
        for each in fields:
            if holds_text(each) and (settings or "Path" in str(each.type)):
                yield kind, each


def refuses(kind: type, attribute: "attrs.Attribute[Any]", value: object) -> str:
    """What a class says of a value of one of its fields; empty where it takes it."""
    if "Mapping" in str(attribute.type):
        value = {"a name": value}
    try:
        if attribute.converter is not None:
            value = cast(Callable[[Any], Any], attribute.converter)(value)
        if attribute.validator is not None:
            attribute.validator(None, attribute, value)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("package", PACKAGES)
def test_every_setting_that_can_be_a_path_refuses_what_is_none(package: str) -> None:
    """When it is built, in one line; what is no path is known by name."""
    missing = set()
    for kind, attribute in text_fields(package):
        name = f"{kind.__name__}.{attribute.name}"
        if attribute.name in TEXTS or name in MADE_HERE:
            continue
        for what, value in BAD.items():
            said = refuses(kind, attribute, value)
            if not any(remedy in said for remedy in REMEDIES) or "\n" in said or len(said) > 600:
                missing.add(f"{name} takes {what}")
    assert sorted(missing) == []


def public_functions(package: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Public functions, classes and methods by name."""
    module = importlib.import_module(module_of(package))
    for name in module.__all__:
        thing = getattr(module, name)
        if inspect.isclass(thing) and not issubclass(thing, Exception):
            if not attrs.has(thing) and thing.__init__ is not object.__init__:
                yield name, thing
            for member, value in vars(thing).items():
                if not member.startswith("_") and isinstance(value, classmethod):
                    yield f"{name}.{member}", getattr(thing, member)
                elif not member.startswith("_") and inspect.isfunction(value):
                    yield f"{name}.{member}", value
        elif inspect.isfunction(thing):
            yield name, thing


def paths_of(function: Callable[..., Any]) -> list[str]:
    """Names of the parameters that take paths."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [
        each.name
        for each in parameters
        if "Path" in str(each.annotation) and "Callable" not in str(each.annotation)
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_function_refuses_a_path_before_anything_else(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its other parameters are not looked at: here they are nothing that would do."""
    monkeypatch.chdir(tmp_path)
    missing = []
    for name, function in public_functions(package):
        own = [] if name in MADE_HERE else paths_of(function)
        for parameter in own:
            for what, value in BAD.items():
                said = said_of(function, {**dict.fromkeys(own, "x"), parameter: value})
                if not any(remedy in said for remedy in REMEDIES):
                    missing.append(f"{name}({parameter}=) takes {what}: {said}")
    assert missing == []
    assert list(tmp_path.iterdir()) == []


def said_of(function: Callable[..., Any], given: dict[str, Any]) -> str:
    """The error of a call in which all else is None."""
    parameters = inspect.signature(function).parameters.values()
    needed = [
        each.name
        for each in parameters
        if each.default is each.empty and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    ]
    arguments = {name: FITTING.get(name) for name in needed} | given
    try:
        made = function(**arguments)
        if isinstance(made, Iterator):
            next(made)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:600]
    return "taken"
