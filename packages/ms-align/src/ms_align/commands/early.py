"""Checks of a run file that need no torch, so that a mistake is reported at once."""

import os
import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from typing import Any

from ms_align.commands.command import HIDDEN, Command
from ms_align.errors import ConfigError
from ms_align.files.model_name import missing_model
from ms_align.settings import nearest

MODELS = ("model", "policy_model", "reference_model", "value_model", "teacher_model")
OTHER_NAMES = {"policy_model", "prompt_dataset", "data", "reference", "out", "generator"}
"""Keys that a trainer takes or explains, and that the key groups do not list."""


def check_early(command: Command, settings: Mapping[str, Any], where: str) -> None:
    """Check a run file's keys, and that the models and reward modules that it names exist.

    Raises:
        ConfigError: a key is unknown, or a folder or module does not exist.
    """
    if command.run.startswith("commands.train:"):
        names = {key.name for group in command.groups() for key in group.keys}
        for key in settings:
            if key not in names | OTHER_NAMES | HIDDEN:
                raise ConfigError(f"{where}: unknown key {key!r}; {nearest(key, names)}")
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
