"""Checks a run file without importing torch, so that mistakes are reported immediately."""

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
from ms_align.environments.options import EpisodeOptions
from ms_align.errors import ConfigError
from ms_align.files.model_name import missing_dataset, missing_model
from ms_align.generation.sampling import Sampling
from ms_align.losses.distillation import GKDOptions
from ms_align.losses.preference import DPOOptions
from ms_align.losses.surrogates import SurrogateOptions
from ms_align.losses.unpaired import KTOOptions
from ms_align.rollouts.options import RolloutOptions
from ms_align.run.options import RunOptions, check_length
from ms_align.settings import flag, integer, number, numbers, one_of, text, valid_path
from ms_align.settings.keys import Key
from ms_align.settings.run_file import build
from ms_align.settings.synonyms import nearest_key
from ms_align.settings.validators import Check

MODELS = ("model", "policy_model", "reference_model", "value_model", "teacher_model")
OTHER_NAMES = {"policy_model": "model", "prompt_dataset": "dataset"}
"""Aliases of keys that commands accept as well."""
DATASETS = {
    "dataset": "a folder of shards, or for prompts a JSON Lines file",
    "prompt_dataset": "a JSON Lines file of prompts",
    "response_dataset": "a JSON Lines file of answers",
    "held_out": "a folder of shards, or for prompts a JSON Lines file",
}
"""Keys of datasets, with the expected value for error messages."""
VALIDATORS = {"integer": integer, "number": number, "numbers": numbers, "one_of": one_of}
VALIDATORS |= {"text": text, "valid_path": valid_path}
OPTIONS_CLASSES: tuple[type, ...] = (EngineOptions, ComputeOptions, DeviceOptions, OptimizerOptions)
OPTIONS_CLASSES += (RunOptions, RolloutOptions, Sampling, DPOOptions, SurrogateOptions)
OPTIONS_CLASSES += (KTOOptions, GKDOptions, EpisodeOptions)
"""Base classes of commands' settings that do not need torch."""


def check_early(command: Command, settings: Mapping[str, Any], where: str) -> None:
    """Check a run file's keys and values, and that the models, data and modules in it exist.

    Raises:
        ConfigError: a key is unknown, a value is invalid, or a path or module does not exist.
    """
    keys = [key for group in command.groups() for key in group.keys]
    names = {key.name for key in keys}
    for unknown in settings.keys() - names - OTHER_NAMES.keys() - HIDDEN:
        raise ConfigError(f"{where}: unknown key {unknown!r}; {nearest_key(unknown, names)}")
    aliased = {OTHER_NAMES[name] for name in settings.keys() & OTHER_NAMES.keys()}
    missing = {key.name for key in keys if key.required} - settings.keys() - aliased
    if missing:
        raise ConfigError(f"{where}: {', '.join(sorted(missing))} is missing; add it")
    try:
        _check_values(keys, settings)
        if command.run == "commands.train:offline":
            check_length(settings.get("steps"), settings.get("epochs"))
            if "sequence_length" not in settings:
                raise ConfigError("sequence_length is missing; add it")
        for key in DATASETS:
            if key in settings:
                valid_path(multiple=True)(None, _attribute(key), settings[key])
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    _check_options(command, names, settings, where)
    for key in MODELS:
        for name in _texts(settings.get(key)):
            if (problem := missing_model(name)) is not None:
                raise ConfigError(f"{where}: {key} must be a local folder: {problem}")
    for name in _texts(settings.get("reward_model")):
        module, colon, _ = name.partition(":")
        top = module.partition(".")[0]
        if name == "environment":
            continue
        if not colon:
            if (problem := missing_model(name)) is not None:
                raise ConfigError(f"{where}: reward_model must be a local folder: {problem}")
        elif top.isidentifier() and not _is_module(top):
            raise ConfigError(
                f"{where}: reward_model {name!r} cannot be imported: No module named {top!r}; use"
                " module:function with a module in this folder or on PYTHONPATH, or the folder of a"
                " reward model"
            )
    for key, expected in DATASETS.items():
        for name in _texts(settings.get(key)):
            if (problem := missing_dataset(name, expected)) is not None:
                raise ConfigError(f"{where}: {key} must exist: {problem}")


def _check_values(keys: Iterable[Key], settings: Mapping[str, Any]) -> None:
    """Apply the fields' validators to the values in a run file."""
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
    """Build a stand-in for an attrs attribute, whose only used field is the name."""
    return SimpleNamespace(name=name)


def _check_options(
    command: Command, names: Iterable[str], settings: Mapping[str, Any], where: str
) -> None:
    """Build the options classes that a command inherits, which validates their settings."""
    options: list[object] = []
    for options_class in OPTIONS_CLASSES:
        field_names = {attribute.name for attribute in fields(options_class)}
        if field_names - HIDDEN <= set(names):
            values = {key: settings[key] for key in settings.keys() & field_names}
            options.append(build(options_class, values, where=where))
    layout = settings.get("layout")
    try:
        check_layout(layout)
        if isinstance(layout, Mapping):
            layout_of(layout)
        elif command.name != "reward":  # it does not support layouts and has another remedy
            for item in options:
                if isinstance(item, ComputeOptions):
                    item.check_single_process()
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _validator(source: str) -> Check | None:
    """Build a validator, such as from `integer(minimum=0)`; None for the function of a class.

    Arguments must be literals, as `Key.check` inserts the values of constants; a computed limit is
    left to the class.
    """
    if source == "flag":
        return flag
    try:
        call = ast.parse(source, mode="eval").body
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
            return None
        arguments = [ast.literal_eval(argument) for argument in call.args]
        literals = [word for word in call.keywords if not isinstance(word.value, ast.Name)]
        keywords = {str(word.arg): ast.literal_eval(word.value) for word in literals}
    except (SyntaxError, ValueError):
        return None
    factory: Any = VALIDATORS.get(call.func.id)
    return None if factory is None else factory(*arguments, **keywords)


def _is_module(name: str) -> bool:
    loaded = name in sys.modules or name in sys.builtin_module_names
    # `PathFinder` finds the module without importing it.
    return loaded or PathFinder.find_spec(name, [os.getcwd(), *sys.path]) is not None


def _texts(value: Any) -> Iterator[str]:
    """Yield the strings in a setting: a string, or a list or table of these."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)
