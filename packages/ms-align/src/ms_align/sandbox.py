"""Runs a Python program that nobody has read, within limits of time and memory.

The program runs in an interpreter of its own that first takes its limits and then cannot give them
back. What is enforced, and by what:

| limit | by |
|---|---|
| processor time, memory, open files, no core dump, no bytes written to files | rlimits (POSIX) |
| wall-clock time | its whole session is killed from outside |
| no network, no other program or process, no signal | seccomp (Linux on x86-64 and arm64) |
| no file opened for writing, no name in the file system changed | likewise |

What is not: it may read any file that this user may read, and threads of its own share its limits.
A program that rummages in its interpreter's memory could forge a pass; one that merely ends early
cannot. Where seccomp is missing, nothing is run unless `unconfined` allows it.
"""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache

from attrs import field, frozen

from ms_align.errors import ConfigError
from ms_align.sandbox_launcher import LAUNCHER, confinement
from ms_align.settings import flag, number, whole

__all__ = ["Limits", "Outcome", "run_python"]

SHOWN_CHARACTERS = 2000


@frozen(kw_only=True)
class Limits:
    """What a program may use."""

    wall_s: float = field(default=5.0, validator=number(least=0.01))
    cpu_s: int = field(default=4, validator=whole())
    memory_mib: int = field(default=512, validator=whole(least=64))
    """Address space, that of the interpreter (some 30 MiB) included."""
    unconfined: bool = field(default=False, validator=flag)
    """Run without seccomp where there is none: network and files are then open to the program."""


@frozen(kw_only=True)
class Outcome:
    """What became of a program."""

    passed: bool
    """It ran to its end."""
    reason: str
    """`passed`, `failed`, `timeout`, `memory` or `ended early`."""
    told: str
    """The end of what it printed to its errors."""
    confined: bool
    """Whether network, files and processes were shut off."""


def run_python(program: str, limits: Limits | None = None) -> Outcome:
    """Runs a program to its end.

    Raises:
        ConfigError: this machine cannot shut off the network, and `unconfined` is not set.
    """
    limits = limits or Limits()
    confined = _can_confine()
    if not confined and not limits.unconfined:
        raise ConfigError(
            "programs cannot be shut off from network and files on this machine (no seccomp); run "
            "in a container without network and set unconfined, or use another reward"
        )
    # Told after the program's last line; it ends early without it.
    word = secrets.token_hex(16)
    settings = f"{word} {limits.cpu_s} {limits.memory_mib << 20} {int(confined)}\n"
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", LAUNCHER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env={"PATH": "", "HOME": folder},
            start_new_session=True,
        )
        try:
            out, err = process.communicate((settings + program).encode(), timeout=limits.wall_s)
        except subprocess.TimeoutExpired:
            _end(process)
            return Outcome(passed=False, reason="timeout", told="", confined=confined)
    told = err.decode(errors="replace")[-SHOWN_CHARACTERS:]
    passed = process.returncode == 0 and out.rstrip().endswith(word.encode())
    reason = "passed" if passed else _reason(process.returncode, told)
    return Outcome(passed=passed, reason=reason, told=told, confined=confined)


def _reason(status: int, told: str) -> str:
    if status == -signal.SIGXCPU or status == -signal.SIGKILL:
        return "timeout"
    if "MemoryError" in told or status in (-signal.SIGSEGV, -signal.SIGABRT):
        return "memory"
    return "ended early" if status == 0 else "failed"


def _end(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):  # it may have ended by itself in between
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@cache
def _can_confine() -> bool:
    """Whether a program that is shut off really is: it tries to open a socket and a file."""
    if confinement() is None:
        return False
    attempt = (
        "import socket, os\n"
        "for act in (socket.socket, os.fork, lambda: open('x', 'w')):\n"
        "    try:\n        act()\n"
        "    except OSError:\n        continue\n"
        "    raise SystemExit('open')\n"
    )
    word = "probe"
    run = subprocess.run(
        [sys.executable, "-I", "-S", "-c", LAUNCHER],
        input=f"{word} 10 {1 << 30} 1\n{attempt}".encode(),
        capture_output=True,
        check=False,
        env={"PATH": ""},
        cwd=tempfile.gettempdir(),
    )
    return run.returncode == 0 and run.stdout.rstrip().endswith(word.encode())
