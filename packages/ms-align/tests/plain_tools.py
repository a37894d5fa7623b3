"""Tools and an environment for tests. They import no torch, as their process is forked."""

import os
import signal
import time
from typing import Any


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: first number
        b: second number
    """
    return a + b


def misbehave(how: str) -> str:
    """Misbehave.

    Args:
        how: kind of misbehavior
    """
    if how == "hang":
        time.sleep(1000)
    if how == "spin":
        while True:
            pass
    if how == "raise":
        raise ValueError("no such thing")
    if how == "exit":
        os._exit(3)
    if how == "flood":
        return "x" * (1 << 24)
    if how == "memory":
        return str(len(bytearray(1 << 40)))
    return "well"


class Countdown:
    """Environment that asks to count down from a number; the reward is the share of right steps."""

    def reset(self, row: dict[str, Any], *, seed: int) -> str:
        """Start at the row's answer."""
        self.number = self.start = int(row["answer"])
        self.fault = row.get("fault")
        return f"start at {self.number}"

    def step(self, response: str) -> tuple[str | None, float, bool]:
        """Reward the next number."""
        if self.fault is not None:
            misbehave(self.fault)
            if self.fault == "flood":
                return "x" * (1 << 24), 0.0, False
        self.number -= 1
        reward = float(response.strip() == str(self.number)) / self.start
        return f"go on from {self.number}", reward, self.number == 0


class KillsTheTrainer(Countdown):
    """Kill the trainer with SIGKILL at step KILL_AT of all episodes together, if that is set."""

    def step(self, response: str) -> tuple[str | None, float, bool]:
        """Count steps in a file, as each episode has a process of its own."""
        if "KILL_AT" in os.environ:
            with open(os.environ["STEPS_FILE"], "ab+") as file:
                file.write(b".")
                file.flush()
                if file.tell() == int(os.environ["KILL_AT"]):
                    with open(f"/proc/{os.getppid()}/stat") as stat:
                        trainer = int(stat.read().rpartition(")")[2].split()[1])
                    os.kill(trainer, signal.SIGKILL)
        return super().step(response)
