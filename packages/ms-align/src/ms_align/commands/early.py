"""Checks of a run file that need no torch, so that a mistake is reported at once."""

import ast
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import PathFinder
from types import SimpleNamespace
from typing import Any

from attrs import fields

from ms_align.commands.command import HIDDEN, Command
from ms_align.engines.layout import check_layout, layout_of
from ms_align.engines.optimizer import OptimizerOptions
from ms_align.engines.options import ComputeOptions, DeviceOptions, EngineOptions
from ms_align.errors import ConfigError
from ms_align.files.model_name import missing_dataset, missing_model
from ms_align.generation.sampling import Sampling
from ms_align.rollouts.options import RolloutOptions
from ms_align.run.options import RunOptions, check_length
from ms_align.settings import a_path, flag, nearest, number, numbers, one_of, text, whole
from ms_align.settings.keys import Key
from ms_align.settings.run_file import build, refuse_renamed
from ms_align.settings.validators import Check

MODELS = ("model", "policy_model", "reference_model", "value_model", "teacher_model")
OTHER_NAMES = {"policy_model": "model", "prompt_dataset": "dataset"}
OTHER_NAMES |= {"include_path": "task_folder", "num_fewshot": "few_shot"}
OTHER_NAMES |= {"output_path": "out", "apply_chat_template": "chat"}
"""Keys that commands take too, with the names that the key groups have for them."""
DATASETS = {
    "dataset": "a folder of shards, or for prompts a JSON Lines file",
    "prompt_dataset": "a JSON Lines file of prompts",
    "response_dataset": "a JSON Lines file of answers",
    "held_out": "a folder of shards, or for prompts a JSON Lines file",
}
"""Keys that name data, each with what to give."""
VALIDATORS = {"whole": whole, "number": number, "numbers": numbers, "one_of": one_of}
VALIDATORS |= {"text": text, "a_path": a_path}
PARTS: tuple[type, ...] = (EngineOptions, ComputeOptions, DeviceOptions, OptimizerOptions)
PARTS += (RunOptions, RolloutOptions, Sampling)
"""Classes of settings that need no torch, and that commands inherit from."""


def check_early(command: Command, settings: Mapping[str, Any], where: str) -> None:
    """Check a run file's keys and values, and that the models, data and modules in it exist.

    Raises:
        ConfigError: a key is unknown, a value is refused, or a path or module does not exist.
    """
    refuse_renamed(settings, command.renamed, where=where)
    keys = [key for group in command.groups() for key in group.keys]
    names = {key.name for key in keys}
    for unknown in settings.keys() - names - OTHER_NAMES.keys() - HIDDEN:
        raise ConfigError(f"{where}: unknown key {unknown!r}; {nearest(unknown, names)}")
    known = {OTHER_NAMES[name] for name in settings.keys() & OTHER_NAMES.keys()}
    needed = {key.name for key in keys if key.required} - settings.keys() - known
    if needed:
        raise ConfigError(f"{where}: {', '.join(sorted(needed))} is missing; add it")
    try:
        _check_values(keys, settings)
        if command.run == "commands.train:offline":
            check_length(settings.get("steps"), settings.get("epochs"))
            if "sequence_length" not in settings:
                raise ConfigError("sequence_length is missing; add it")
        for key in DATASETS:
            if key in settings:
                a_path(several=True)(None, _attribute(key), settings[key])
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    _check_parts(command, names, settings, where)
    for key in MODELS:
        name = settings.get(key)
        if isinstance(name, str) and (problem := missing_model(name)) is not None:
            raise ConfigError(f"{where}: {key} must be a local folder: {problem}")
    for name in _texts(settings.get("reward_model")):
        module, colon, _ = name.partition(":")
        top = module.partition(".")[0]
        if not colon:
            if (problem := missing_model(name)) is not None:
                raise ConfigError(f"{where}: reward_model must be a local folder: {problem}")
        elif top.isidentifier() and not _is_module(top):
            raise ConfigError(
                f"{where}: reward_model {name!r} cannot be imported: No module named {top!r}; give"
                " module:function of a module in this folder or on PYTHONPATH, or a folder of a"
                " reward model"
            )
    for key, what in DATASETS.items():
        for name in _texts(settings.get(key)):
            if (problem := missing_dataset(name, what)) is not None:
                raise ConfigError(f"{where}: {key} must exist: {problem}")


def _check_values(keys: Iterable[Key], settings: Mapping[str, Any]) -> None:
    """Apply the validators of the fields, which need no torch, to the values that are given."""
    for key in keys:
        value = settings.get(key.name)
        if value is None:
            continue
        if isinstance(value, Mapping):
            _check_values(key.inner, value)
        validator = _validator(key.check)
        if validator is not None:
            validator(None, _attribute(key.name), value)


def _attribute(name: str) -> Any:
    """Make what a validator reads of a field: its name."""
    return SimpleNamespace(name=name)


def _check_parts(
    command: Command, names: Iterable[str], settings: Mapping[str, Any], where: str
) -> None:
    """Build the parts of a command's settings that need no torch; each checks its own settings."""
    parts: list[object] = []
    for kind in PARTS:
        own = {each.name for each in fields(kind)}
        if own - HIDDEN <= set(names):
            given = {key: settings[key] for key in settings.keys() & own}
            parts.append(build(kind, given, where=where))
    layout = settings.get("layout")
    try:
        check_layout(layout)
        if isinstance(layout, Mapping):
            layout_of(layout)
        elif command.name != "reward":  # which takes no layout, and has another remedy
            for part in parts:
                if isinstance(part, ComputeOptions):
                    part.check_alone()
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _validator(source: str) -> Check | None:
    """Build a validator from its source, such as `whole(least=0)`; None for one of a class's own.

    Its arguments are literals, as `Key.check` fills constants in; a limit that is computed is left
    for the class to check.
    """
    if source == "flag":
        return flag
    try:
        call = ast.parse(source, mode="eval").body
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
            return None
        words = [ast.literal_eval(word) for word in call.args]
        known = [given for given in call.keywords if not isinstance(given.value, ast.Name)]
        named = {str(given.arg): ast.literal_eval(given.value) for given in known}
    except (SyntaxError, ValueError):
        return None
    kind: Any = VALIDATORS.get(call.func.id)
    return None if kind is None else kind(*words, **named)


def _is_module(name: str) -> bool:
    known = name in sys.modules or name in sys.builtin_module_names
    return known or PathFinder.find_spec(name, [os.getcwd(), *sys.path]) is not None


def _texts(given: Any) -> Iterator[str]:
    """Yield the names in rewards: a text, a list of these, or a table of names to these."""
    if isinstance(given, str):
        yield given
    elif isinstance(given, Mapping | list | tuple):
        for each in given.values() if isinstance(given, Mapping) else given:
            yield from _texts(each)
