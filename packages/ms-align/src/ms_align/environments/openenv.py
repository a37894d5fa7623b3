"""Environments of OpenEnv servers."""

import importlib
import json
from collections.abc import Mapping
from typing import Any, ClassVar

from ms_align.errors import ConfigError, RewardError

__all__ = ["OpenEnvEnvironment"]


class OpenEnvEnvironment:
    """An episode of a running OpenEnv server, as the `environment` of a trainer.

    Subclass it in a module of your own, set `base_url`, and override `action` and `message` if the
    server's action and observation are not one text field each. An episode is one session
    (WebSocket) of the server, which needs a session for each episode that runs at the same time.
    """

    base_url: ClassVar[str] = "http://127.0.0.1:8000"
    """Address of the server."""
    action_field: ClassVar[str] = "message"
    """Field of the action that gets the policy's response."""
    observation_field: ClassVar[str | None] = None
    """Field of the observation that is shown to the policy; None: the entire observation as
    JSON."""
    timeout_s: ClassVar[float] = 60.0
    """Time limit in seconds of an answer; `tool_limits.timeout_s` limits the entire step."""
    max_message_mib: ClassVar[float] = 4.0
    """Size limit of an answer in MiB."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Import OpenEnv once, in the process from which all episodes are forked."""
        super().__init_subclass__(**arguments)
        _client_class()

    def reset_arguments(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments of the server's `reset` besides `seed`, such as the task of a row."""
        return {}

    def action(self, response: str) -> dict[str, Any]:
        """Return the action of a response."""
        return {self.action_field: response}

    def message(self, observation: dict[str, Any]) -> str:
        """Return an observation as the text of the next message."""
        if self.observation_field is None:
            return json.dumps(observation, ensure_ascii=False)
        value = observation[self.observation_field]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    def reset(self, row: dict[str, Any], *, seed: int) -> str:
        """Start a session and reset it.

        Raises:
            RewardError: the server does not answer, or not as OpenEnv does.
        """
        self._client: Any = _client_class()(
            base_url=self.base_url,
            connect_timeout_s=self.timeout_s,
            message_timeout_s=self.timeout_s,
            max_message_size_mb=self.max_message_mib,
        ).sync()
        self._session: Any = None
        # OpenEnv's seeds are not negative, and fit numpy's.
        arguments = {"seed": seed % 2**32, **self.reset_arguments(row)}
        return self._answer("reset", lambda: self._client.reset(**arguments))[0]

    def step(self, response: str) -> tuple[str, float, bool]:
        """Act; return the next message, the reward and whether the episode is done.

        Raises:
            RewardError: the server does not answer, or not as OpenEnv does.
        """
        action = self.action(response)
        return self._answer("step", lambda: self._client.step(action))

    def _answer(self, request: str, send: Any) -> tuple[str, float, bool]:
        """Send a request; return the checked message, reward and `done`."""
        try:
            result = send()
            session = self._client.state().get("episode_id")
        except Exception as error:  # sockets, websockets, JSON and OpenEnv have no common base
            problem = " ".join(str(error).split())[:200] or type(error).__name__
            raise RewardError(
                f"{request} of the OpenEnv server {self.base_url} failed: {problem}; check that it "
                "runs, its log, and that it has a session for each episode"
            ) from error
        # OpenEnv's client connects again on its own, to a session that was never reset.
        if request == "step" and session != self._session:
            raise RewardError(
                f"the OpenEnv server {self.base_url} must keep a session for the entire episode, "
                f"but it changed from {self._session!r} to {session!r}; keep the server running"
            )
        self._session = session
        reward = 0.0 if result.reward is None else result.reward
        if not isinstance(result.observation, dict) or not isinstance(reward, int | float):
            raise RewardError(
                f"{request} of the OpenEnv server {self.base_url} must return an observation and "
                f"a number as reward, got {str(result)[:100]!r}; check its version"
            )
        try:
            text = self.message(result.observation)
        except KeyError as error:
            fields = ", ".join(sorted(map(str, result.observation)))[:200]
            raise RewardError(
                f"observation_field must be a field of the observation ({fields}), got {error}; "
                f"correct it in {type(self).__name__}"
            ) from error
        return text, float(reward), bool(result.done)


def _client_class() -> Any:
    """Return OpenEnv's client.

    Raises:
        ConfigError: OpenEnv is not installed.
    """
    try:
        return importlib.import_module("openenv").GenericEnvClient
    except ImportError as error:
        raise ConfigError(
            f"OpenEnvEnvironment needs OpenEnv; install it with `pip install openenv` ({error})"
        ) from error
