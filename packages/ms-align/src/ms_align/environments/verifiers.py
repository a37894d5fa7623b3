"""Environments of the package verifiers, which run through the gateway.

An environment of verifiers runs its own loop against an endpoint in OpenAI's format: a harness (a
chat program, or a coding agent) talks to the policy, and the task's rewards score the conversation.
So nothing of it is rewritten: the agent of a trainer runs one episode of verifiers.
"""

import asyncio
import functools
import importlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from ms_align.errors import ConfigError, RewardError

__all__ = ["VerifiersEnvironment", "from_verifiers", "play"]

_KEY_VARIABLE = "MS_ALIGN_GATEWAY_API_KEY"
"""Environment variable in which verifiers looks for the key; it hides names with API_KEY from the
programs that it starts."""

vf: Any
try:
    # At module level, so that the process from which agents are forked imports it once.
    vf = importlib.import_module("verifiers.v1")
except ImportError as error:
    vf, _PROBLEM = None, str(error)


class VerifiersEnvironment:
    """Tasks of an environment of verifiers.

    Iterating yields rows with `prompt` and `verifiers`, the task and the settings as JSON, so the
    rows may also be written to a file. Pass `play` as the agent and `"environment"` as the reward.

    Args:
        config: validated settings of the environment, verifiers' `EnvConfig`.
        size: maximum number of tasks.
    """

    def __init__(self, config: Any, *, size: int) -> None:
        self.config = config
        self.size = size

    agent = "ms_align.environments.verifiers:play"
    """Agent of the trainer."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield a row for each task, in the order of the taskset.

        Raises:
            ConfigError: the tasks cannot be loaded.
        """
        config = self.config.model_dump(mode="json")
        try:
            for index, task in enumerate(itertools.islice(_environment(config).taskset, self.size)):
                text = task.data.prompt_text or task.data.name or f"task {index}"
                data = task.data.model_dump(mode="json")
                yield {"prompt": text, "verifiers": {"config": config, "task": data}}
        except Exception as error:  # a taskset may raise anything
            raise ConfigError(
                f"the tasks of {self.config.env_id!r} must load: {_short(error)}; correct its "
                "settings"
            ) from error


def from_verifiers(
    taskset: str, *, size: int = 1000, config: Mapping[str, Any] | None = None
) -> VerifiersEnvironment:
    """Open an environment of verifiers with one agent.

    Args:
        taskset: id of an installed taskset, such as the package `my_taskset`.
        size: maximum number of tasks; a taskset may be infinite.
        config: settings of the environment, as in the `[env]` table of verifiers. Unless it says
            otherwise, the agent is the harness of the taskset or else `null`, a chat with the
            task's tools, and runs in a subprocess.

    Raises:
        ConfigError: verifiers is not installed, or rejects the settings.
    """
    _check_installed()
    settings = dict(config or {})
    settings["taskset"] = {**settings.get("taskset", {}), "id": taskset}
    try:
        config_type = vf.env_config_type(taskset, settings.get("id", ""))
        roles = _roles(config_type())
        if len(roles) == 1:
            # verifiers' defaults are a rented sandbox, and a harness with a shell.
            (role,) = roles
            harness = vf.default_harness_id(taskset)
            defaults = {
                "runtime": {"type": "subprocess"},
                "harness": {"id": "null" if harness == "bash" else harness},
            }
            settings[role] = {**defaults, **settings.get(role, {})}
        environment = VerifiersEnvironment(vf.resolve_env_config(settings), size=size)
        _environment(environment.config.model_dump(mode="json"))
    except Exception as error:  # pydantic, ImportError, and what the taskset raises
        raise ConfigError(
            f"{taskset!r} must be an installed taskset of verifiers with valid settings: "
            f"{_short(error)}; install it, or correct config"
        ) from error
    if len(roles) != 1:
        raise ConfigError(
            f"an environment of verifiers must have one agent, the policy, but {taskset!r} has "
            f"{', '.join(roles)}; use one with a single agent"
        )
    return environment


def play(row: Mapping[str, Any], *, base_url: str, api_key: str) -> float:
    """Run one episode; return the sum of the task's weighted rewards.

    Raises:
        RewardError: the episode failed, or the row is not from `from_verifiers`.
    """
    _check_installed()
    settings = row.get("verifiers")
    if not isinstance(settings, Mapping) or not settings.keys() >= {"config", "task"}:
        raise RewardError(
            "each row must have the column `verifiers`; train on the rows of from_verifiers"
        )
    environment = _environment(settings["config"])
    task_class = vf.task_type(environment.config.taskset.id)
    # As verifiers' own server does with a task that it gets over the wire.
    data = task_class.data_type().model_validate(settings["task"])
    task = task_class(data, environment.config.taskset.task)
    os.environ[_KEY_VARIABLE] = api_key
    client = vf.EvalClientConfig(base_url=base_url, api_key_var=_KEY_VARIABLE)
    episode = asyncio.run(_run(environment, task, vf.ModelContext(model="policy", client=client)))
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        problem = f"{errors[-1].type}: {errors[-1].message}" if errors else "it has no result"
        raise RewardError(
            f"the episode of {environment.config.env_id!r} failed: {_short(problem)}; check the "
            "environment and tool_limits"
        )
    return float(sum(trace.reward for trace in episode.traces))


async def _run(environment: Any, task: Any, context: Any) -> Any:
    async with environment.serving():
        return await environment.run_episode(task, context)


def _environment(config: Mapping[str, Any]) -> Any:
    """Load the environment of these settings, once per process."""
    return _loaded(json.dumps(config, sort_keys=True))


@functools.lru_cache(maxsize=8)
def _loaded(config: str) -> Any:
    return vf.load_environment(vf.resolve_env_config(json.loads(config)))


def _roles(config: Any) -> list[str]:
    """Return the names of an environment's agents."""
    return [name for name, value in config if isinstance(value, vf.AgentConfig)]


def _short(problem: object) -> str:
    """Return a problem in one short line."""
    return " ".join(str(problem).split())[:300]


def _check_installed() -> None:
    if vf is None:
        raise ConfigError(
            f"environments of verifiers need the package; install it with "
            f"`pip install verifiers uv` ({_PROBLEM})"
        )
