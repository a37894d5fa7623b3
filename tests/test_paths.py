"""Every path from a user is validated by the shared check, also in new settings and arguments.

Users pass paths in settings (attrs classes), command arguments, and calls of public functions.
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

BAD_PATHS = {
    "NUL character": "a\0b",
    "lone surrogate": "a\ud800b",
    "very long name": "x" * 5000,
    "long name in a missing folder": f"not-there/{'x' * 300}",
    "empty": "",
}
PATH_MESSAGES = ("must be a path", "use another path")
"""Parts of the messages of the shared check."""

TEXT_ARGUMENTS = {
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
        *("name", "module", "time", "image", "claim", "resource", "address"),
    },
    "ms-profile": {
        *("metrics", "arguments", "kind", "rank", "title", "backend", "name", "project", "to"),
        "device",
    },
    "ms-align": {"set"},
    "ms-compress": {"method", "methods", "schemes", "scheme", "set"},
}
"""Text arguments that are not paths."""

TEXT_FIELDS = {
    *(
        "stop_strings",
        "stop_token_ids",
        "layout",
        "target_modules",
        "head",
        "kl_estimator",
        "tests_key",
    ),
    *("offload", "sharding", "save_dtype", "schemes", "methods", "float8", "quantize_base"),
    *("target_parameters", "init_lora_weights", "expert_files"),
    *("given", "base", "generator", "task_weights", "tasks", "weighting", "long", "ignore"),
    "kv_cache",
    *("start", "method", "title", "name", "target", "scale_dtype", "format", "text_column"),
    *("decay",),
    *("heads", "model_type", "optimizer", "model_config", "learning_rate_decay", "recompute"),
    *("device", "ops", "sample_prompt", "arguments", "metrics", "balance", "runtime"),
    *(
        "loss_type",
        "f_divergence_type",
        "importance_sampling_level",
        "teacher_layout",
        "teacher_weights",
        "url",
        "urls",
        "api_key_env",
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
    *("checkpoint_store", "module", "time"),
    *("chip", "peak_tflops", "products", "dtype", "product_dtype", "skip_hint"),
}
"""Text settings that are not paths."""

OPERANDS = {("compare", "after"): ["x"], ("launch", "run_file"): ["slurm"]}
"""Arguments before those that are tested."""

INTERNAL = {
    *("RunOutput.folder", "Footprint.folder", "TokenizerFiles.path", "Corpus.files"),
    *("Corpus.names", "Corpus.named", "Result.model_folder", "FoundTraces.files"),
    *("TokenizerSource.path", "Loop.folder", "Loop.result", "TransformersModel.folder"),
    *("SFTTrainer.weights", "ChatTemplate.with_tokens_of", "OpenFile.path"),
    *("Run.corpus", "CheckpointJob.folder", "Processor.folder", "ArrayShard.folder"),
    *("_PlanRequest.shards", "StepRecorder.folder", "Run.shards", "VllmOptions.model"),
    *("BlockFiles.folder", "ClusterJob.run_file"),
    *("Scheme.fallback", "Scheme.larger"),
}
"""Fields that only the package sets, from validated paths, and other fields that share their name
with a path of another class."""

VALID_ARGUMENTS = {"sequence_length": 8, "batch_size": 1, "vocab_size": 300, "text_column": "text"}
"""Valid values of parameters that some functions check first."""


def parser_of(package: str) -> ArgumentParser:
    """Argument parser of a package's command."""
    build_parser = importlib.import_module(f"{module_of(package)}.cli")._parser
    names = list(inspect.signature(build_parser).parameters)
    return cast(ArgumentParser, build_parser(**dict.fromkeys(names, ())))


def arguments_of(package: str) -> Iterator[tuple[str, Action]]:
    """Yield (subcommand, argument) for all arguments that take a free value."""
    for action in parser_of(package)._actions:
        if isinstance(action, _SubParsersAction):
            for name, command in action.choices.items():
                yield from (
                    (name, argument)
                    for argument in command._actions
                    if argument.nargs != 0 and not argument.choices
                )


def is_converted(action: Action) -> bool:
    """Whether one of the three converters in `entry.py` parses the argument."""
    return str(getattr(action.type, "__module__", "")).endswith(".entry")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_argument_has_a_type_or_is_a_known_text(package: str) -> None:
    """A new text argument must use a converter or be listed above."""
    untyped = [
        f"{command} {action.dest}"
        for command, action in arguments_of(package)
        if action.type in (None, str, Path) and action.dest not in TEXT_ARGUMENTS[package]
    ]
    assert untyped == []


@pytest.mark.parametrize("case", BAD_PATHS)
@pytest.mark.parametrize("package", PACKAGES)
def test_every_bad_path_argument_is_rejected_in_one_line(
    package: str, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and a remedy, before any file is read."""
    main = importlib.import_module(f"{module_of(package)}.cli").main
    checked = 0
    for command, action in arguments_of(package):
        if not is_converted(action):
            continue
        option = next(iter(action.option_strings), None)
        operands = OPERANDS.get((command, action.dest), [])
        argument = [BAD_PATHS[case]] if option is None else [f"{option}={BAD_PATHS[case]}"]
        with pytest.raises(SystemExit) as stop:
            main([command, *operands, *argument])
        message = capsys.readouterr().err
        assert stop.value.code == 2
        assert message.count("\n") == 1, message
        assert any(remedy in message for remedy in (*PATH_MESSAGES, "is not valid UTF-8")), message
        assert len(message) < 600
        checked += 1
    assert checked


def attrs_classes(package: str) -> Iterator[type]:
    """Yield the attrs classes of a package."""
    for path, tree in sources_of(package):
        names = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        parts = path.relative_to(ROOT / "packages" / package / "src").with_suffix("").parts
        text = path.read_text()
        if "from attrs import" not in text or not names:
            continue
        module = importlib.import_module(".".join(parts))
        for name in names:
            cls = getattr(module, name, None)
            if isinstance(cls, type) and attrs.has(cls):
                yield cls


def accepts_text(attribute: "attrs.Attribute[Any]") -> bool:
    """Whether the annotation of a field allows text or a path."""
    annotation = str(attribute.type).replace("pathlib.", "").replace("typing.", "")
    if "Callable" in annotation or "Tensor" in annotation:
        return False
    return any(type_name in annotation for type_name in ("Path", "str", "Any"))


def text_fields(package: str) -> Iterator[tuple[type, "attrs.Attribute[Any]"]]:
    """Yield text fields of classes with validators, and path fields of other classes."""
    for cls in attrs_classes(package):
        fields = [attribute for attribute in attrs.fields(cast(Any, cls)) if attribute.init]
        settings = any(attribute.validator is not None for attribute in fields)
        for attribute in fields:
            if accepts_text(attribute) and (settings or "Path" in str(attribute.type)):
                yield cls, attribute


def error_of(cls: type, attribute: "attrs.Attribute[Any]", value: object) -> str:
    """Error message of a class for a field value; empty if accepted."""
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
def test_every_path_setting_rejects_bad_paths(package: str) -> None:
    """Building the settings fails with one line."""
    missing = set()
    for cls, attribute in text_fields(package):
        name = f"{cls.__name__}.{attribute.name}"
        if attribute.name in TEXT_FIELDS or name in INTERNAL:
            continue
        for case, value in BAD_PATHS.items():
            message = error_of(cls, attribute, value)
            if (
                not any(remedy in message for remedy in PATH_MESSAGES)
                or "\n" in message
                or len(message) > 600
            ):
                missing.add(f"{name} accepts {case}")
    assert sorted(missing) == []


def public_functions(package: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield public functions, classes and methods with their names."""
    module = importlib.import_module(module_of(package))
    for name in module.__all__:
        public_object = getattr(module, name)
        if inspect.isclass(public_object) and not issubclass(public_object, Exception):
            if not attrs.has(public_object) and public_object.__init__ is not object.__init__:
                yield name, public_object
            for member, value in vars(public_object).items():
                if not member.startswith("_") and isinstance(value, classmethod):
                    yield f"{name}.{member}", getattr(public_object, member)
                elif not member.startswith("_") and inspect.isfunction(value):
                    yield f"{name}.{member}", value
        elif inspect.isfunction(public_object):
            yield name, public_object


def path_parameters(function: Callable[..., Any]) -> list[str]:
    """Names of the parameters that accept paths."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [
        parameter.name
        for parameter in parameters
        if "Path" in str(parameter.annotation) and "Callable" not in str(parameter.annotation)
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_function_rejects_a_bad_path_first(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other arguments are invalid, so the path is checked before them."""
    monkeypatch.chdir(tmp_path)
    missing = []
    for name, function in public_functions(package):
        parameters = [] if name in INTERNAL else path_parameters(function)
        for parameter in parameters:
            for case, value in BAD_PATHS.items():
                message = call_error(function, {**dict.fromkeys(parameters, "x"), parameter: value})
                if not any(remedy in message for remedy in PATH_MESSAGES):
                    missing.append(f"{name}({parameter}=) accepts {case}: {message}")
    assert missing == []
    assert list(tmp_path.iterdir()) == []


def call_error(function: Callable[..., Any], values: dict[str, Any]) -> str:
    """Error of a call with `values`; other required arguments are None or `VALID_ARGUMENTS`."""
    parameters = inspect.signature(function).parameters.values()
    required = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    arguments = {name: VALID_ARGUMENTS.get(name) for name in required} | values
    try:
        result = function(**arguments)
        if isinstance(result, Iterator):
            next(result)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:600]
    return "accepted"
