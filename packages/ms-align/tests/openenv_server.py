"""An OpenEnv server for tests: `python openenv_server.py PORT`.

Its environment asks to count down from a number; a row's `fault` asks for misbehavior.
"""

import os
import sys
import time
import uuid
from typing import Any

import uvicorn
from openenv.core import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    """A number as text."""

    message: str


class CountdownObservation(Observation):
    """Observation of a countdown."""

    text: str


class Countdown(Environment):
    """Reward each right number; the first number depends on the seed."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.progress = State()
        self.fault = ""

    def reset(
        self, seed: Any = None, episode_id: Any = None, **arguments: Any
    ) -> CountdownObservation:
        """Start at 2 or 3."""
        self.number = 2 + int(seed) % 2
        self.fault = arguments.get("fault") or ""
        self.progress = State(episode_id=str(uuid.uuid4()), step_count=0)
        return CountdownObservation(text=f"start at {self.number}")

    def step(self, action: Guess, timeout_s: Any = None, **arguments: Any) -> CountdownObservation:
        """Reward the next number."""
        if self.fault == "hang":
            time.sleep(1000)
        if self.fault == "raise":
            raise ValueError("no such\nthing")
        if self.fault == "flood":
            return CountdownObservation(text="x" * (3 << 20))
        if self.fault == "flood more":
            return CountdownObservation(text="x" * (8 << 20))
        if self.fault == "exit":
            os._exit(3)
        self.number -= 1
        self.progress.step_count += 1
        right = action.message.strip() == str(self.number)
        return CountdownObservation(
            text=f"continue from {self.number}", reward=float(right), done=self.number == 0
        )

    @property
    def state(self) -> State:
        """Episode and steps."""
        return self.progress


if __name__ == "__main__":
    app = create_fastapi_app(Countdown, Guess, CountdownObservation, max_concurrent_envs=64)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
