"""Imports the tools and environments named in settings, and describes tools to the model."""

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from ms_align.environments.worker import FILE
from ms_align.errors import ConfigError


class Environment(Protocol):
    """Answers the policy's responses until the episode is done.

    One instance per episode is created without arguments, in a separate process.
    """

    def reset(self, row: dict[str, Any], *, seed: int) -> str | None:
        """Start an episode.

        Args:
            row: the dataset's columns: `prompt`, `answer` and all others.
            seed: seed of the episode's random numbers; the same in a resumed run.

        Returns:
            Text that follows the prompt as a message of the user, if any.
        """

    def step(self, response: str) -> tuple[str | None, float, bool]:
        """Respond to the policy's latest response.

        Returns:
            The next message of the user, the reward of this step, and whether the episode is done.
        """


def target_of(item: str | Callable[..., Any], setting: str) -> str:
    """Return the `module:name` from which another process can import a function or class.

    Raises:
        ConfigError: the object is not defined at the top level of a module.
    """
    if isinstance(item, str):
        return item
    name, module = getattr(item, "__qualname__", "<object>"), getattr(item, "__module__", None)
    if "<" in name or module is None:
        raise ConfigError(
            f"{setting} must be defined at the top level of a module, as they run in another "
            f"process, got {name}; move it there"
        )
    if module != "__main__":
        return f"{module}:{name}"
    path = getattr(sys.modules["__main__"], "__file__", None)
    if path is None:
        raise ConfigError(
            f"{setting} must be defined in a file, as they run in another process, and {name} is "
            "defined interactively; move it to a module"
        )
    return f"{FILE}{Path(path).absolute()}:{name}"


def schemas_of(tools: tuple[str | Callable[..., Any], ...]) -> list[dict[str, Any]]:
    """Return the JSON schema of each tool, built from its type hints and docstring.

    Raises:
        ConfigError: a tool cannot be imported, or lacks types or descriptions of its arguments.
    """
    if not tools:
        return []
    try:
        from transformers.utils.chat_template_utils import get_json_schema
    except ImportError as error:
        raise ConfigError("tools need transformers; install ms-align[hf]") from error
    schemas: list[dict[str, Any]] = []
    for item in tools:
        tool = _imported(item) if isinstance(item, str) else item
        try:
            schemas.append(get_json_schema(tool))
        except Exception as error:  # transformers has no base class for these
            raise ConfigError(
                f"tool {getattr(tool, '__name__', tool)!r} must have a type for each argument and "
                f"a docstring with an Args section that describes it: {error}; add them"
            ) from error
    names = [schema["function"]["name"] for schema in schemas]
    if len(set(names)) < len(names):
        raise ConfigError(f"tools must have different names, got {', '.join(names)}; rename one")
    return schemas


def _imported(target: str) -> Any:
    module, _, name = target.partition(":")
    folder = os.getcwd()
    if folder not in sys.path:  # as for rewards
        sys.path.insert(0, folder)
    try:
        value: Any = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except Exception as error:  # importing a module may raise anything
        raise ConfigError(
            f"tools: {target!r} cannot be imported: {error}; use module:function with a module in "
            "this folder or on PYTHONPATH"
        ) from error
    return value
