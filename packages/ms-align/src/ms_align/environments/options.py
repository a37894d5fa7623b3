"""Settings of tools and environments. Does not import torch."""

from collections.abc import Callable
from typing import Any, ClassVar

from attrs import Attribute, field, frozen

from ms_align.errors import ConfigError
from ms_align.settings import integer, number, short_repr
from ms_align.settings.run_file import table_of
from ms_align.used_settings import UsedIf


@frozen(kw_only=True)
class ToolLimits:
    """Limits of a tool call or an environment step."""

    timeout_s: float = field(default=10.0, validator=number(minimum=0.01, maximum=1e6))
    """Time limit in seconds; the process of a call that takes longer is killed."""
    memory_mib: int = field(default=1024, validator=integer(minimum=16))
    """Memory limit of the process in MiB, besides the imported modules."""
    output_kib: int = field(default=64, validator=integer())
    """Limit of a result or observation in KiB."""
    workers: int = field(default=8, validator=integer(maximum=1024))
    """Calls that run at the same time."""


def _as_tuple(value: Any) -> Any:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else value


def _is_target(value: object) -> bool:
    """Return True for `module:name`, and for a function or class."""
    if isinstance(value, str):
        module, colon, name = value.partition(":")
        return bool(module.strip() and colon and name.strip())
    return callable(value)


def _tools(instance: object, attribute: "Attribute[Any]", value: Any) -> None:
    if not isinstance(value, tuple) or not all(map(_is_target, value)):
        raise ConfigError(
            f"tools must be a list of functions such as ['my_tools:calculator'], got "
            f"{short_repr(value)}; correct it"
        )


def _environment(instance: object, attribute: "Attribute[Any]", value: Any) -> None:
    if value is not None and not _is_target(value):
        raise ConfigError(
            "environment must be a class such as 'my_environment:Maze', got "
            f"{short_repr(value)}; correct it"
        )


def _agent(instance: Any, attribute: "Attribute[Any]", value: Any) -> None:
    if value is not None and not _is_target(value):
        raise ConfigError(
            f"agent must be a function such as 'my_agent:solve', got {short_repr(value)}; "
            "correct it"
        )
    if value is not None and (instance.tools or instance.environment is not None):
        raise ConfigError(
            "agent cannot be combined with tools or environment, as an agent runs its own; remove "
            "them"
        )


def _tool_limits(value: Any) -> ToolLimits:
    """Convert a `tool_limits` setting: limits, a table, or None for the defaults."""
    limits: ToolLimits = table_of(ToolLimits, "tool_limits")({} if value is None else value)
    return limits


@frozen(kw_only=True, slots=False)
class EpisodeOptions:
    """Tools and environments."""

    tools: tuple[str | Callable[..., Any], ...] = field(
        default=(), converter=_as_tuple, validator=_tools
    )
    """Functions that the policy may call: `module:function` each; in Python also the functions.
    Types and docstring describe a function to the model. The tokenizer needs a chat template."""
    environment: str | Callable[..., Any] | None = field(default=None, validator=_environment)
    """Environment that answers the policy's responses: `module:Class`; in Python also the class."""
    agent: str | Callable[..., Any] | None = field(default=None, validator=_agent)
    """Agent that uses the policy through a gateway in OpenAI's format: `module:function`; in Python
    also the function. It is called with a row, `base_url` and `api_key`."""
    max_tool_calling_iterations: int | None = field(
        default=None, validator=integer(minimum=0, optional=True)
    )
    """Maximum number of turns with tool calls in an episode. None: no limit."""
    max_episode_tokens: int | None = field(default=None, validator=integer(optional=True))
    """Maximum number of tokens after the prompt, over all turns and results; `max_new_tokens`
    limits each turn. Default: 4 times `max_new_tokens`."""
    tool_limits: ToolLimits = field(
        default=None, converter=_tool_limits, metadata={"table": ToolLimits}
    )
    """Limits of tools and environments."""

    used_if: ClassVar[tuple[UsedIf, ...]] = (
        UsedIf("max_tool_calling_iterations", "with tools", lambda run: run.tools),
        UsedIf(
            "max_episode_tokens tool_limits",
            "with tools, an environment or an agent",
            lambda run: run.has_episodes,
        ),
    )

    @property
    def has_episodes(self) -> bool:
        """True if there are tools, an environment or an agent."""
        return bool(self.tools) or self.environment is not None or self.agent is not None
