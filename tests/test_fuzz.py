"""The driver of `nox -s fuzz` sees what it is there to see."""

import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from .fuzz import worker
from .fuzz.case import Case, output
from .fuzz.mutations import BY_KIND, BYTES, mutate


def case(run: object, **more: object) -> Case:
    """A case that reads one file."""

    def make(folder: Path) -> None:
        (folder / "a.json").write_text('{"a": [1, 2, 3]}')

    return Case(name="toy", make=make, files=("*",), run=run, **more)  # type: ignore[arg-type]


def ends(tmp_path: Path, run: object, **more: object) -> tuple[str, str]:
    """How a command's run is judged."""
    outcome = worker.invoke(case(run, **more), tmp_path)
    return outcome.failure, outcome.cause


def test_each_way_to_fail_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And exit codes 0, 1 and 2 with a word are none."""

    def raises() -> int:
        raise RecursionError

    def leaves() -> int:
        raise SystemExit(3)

    def prints() -> int:
        import sys

        sys.stderr.write("Traceback (most recent call last)\nKeyError: 1\n")
        return 1

    def grows() -> int:
        return len(bytearray(64 << 20)) * 0

    def hangs() -> int:
        while True:
            pass

    def tells() -> int:
        import sys

        print("a.json: not JSON; write it again", file=sys.stderr)  # noqa: T201
        return 2

    monkeypatch.setattr(worker, "MEMORY_BYTES", 32 << 20)
    monkeypatch.setattr(worker, "CPU_LIMIT_S", 0.2)
    monkeypatch.setattr(worker.resource, "setrlimit", lambda *_: None)  # this process goes on
    kept = worker.signal.signal(worker.signal.SIGPROF, worker.hang)
    try:
        assert ends(tmp_path, raises)[0] == "traceback"
        assert ends(tmp_path, leaves) == ("exit code", "3")
        assert ends(tmp_path, prints)[0] == "traceback"
        assert ends(tmp_path, grows)[0] == "memory"
        began = time.process_time()
        assert ends(tmp_path, hangs)[0] == "hang"
        assert time.process_time() - began < 2
        assert ends(tmp_path, lambda: 2) == ("exit code", "2 without a word")
        for fine in (lambda: 0, lambda: 1, tells):
            assert ends(tmp_path, fine)[0] == ""
    finally:
        worker.signal.signal(worker.signal.SIGPROF, kept)


def trains(steps: int, step_s: float, behind: str = "") -> int:
    """A training of so many steps, which prints and writes, and may then hang."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    Path("out").mkdir(exist_ok=True)
    Path("out/events").touch()
    for step in range(1, steps + 1):
        until = time.process_time() + step_s
        while time.process_time() < until:
            pass
        optimizer.step()
        print(f"step {step}/{steps}  loss 5.7", file=sys.stderr)  # noqa: T201
    while behind:
        pass
    return 0


@pytest.mark.parametrize(
    ("run", "failure"),
    [
        (lambda: trains(2**32, 0.01), ""),  # its settings are large, and nobody's fault
        (lambda: trains(2**32, 0.3), ""),
        (lambda: trains(3, 0.01), ""),
        (lambda: trains(0, 0.0, "hangs"), "hang"),
        (lambda: trains(1, 0.01, "hangs"), "hang"),
        (lambda: trains(3, 0.1, "hangs"), "hang"),
    ],
)
def test_a_training_at_its_limit_must_be_making_steps_still(
    run: Callable[[], int], failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has made a step, or has written files, and then hangs is no training that goes on.

    As a command that is not to train, all of them but the short one hang.
    """
    for name, seconds in (("RUN_LIMIT_S", 0.5), ("CPU_LIMIT_S", 0.5), ("LOOK_S", 0.05)):
        monkeypatch.setattr(worker, name, seconds)
    monkeypatch.setattr(worker.resource, "setrlimit", lambda *_: None)  # this process goes on
    kept = worker.signal.signal(worker.signal.SIGPROF, worker.hang)
    monkeypatch.chdir(tmp_path)
    trains(1, 0.0)  # what a first step of torch's imports takes seconds
    try:
        began = time.process_time()
        outcome = worker.invoke(case(run, trains=True), tmp_path)
        took = time.process_time() - began
        assert outcome.failure == failure
        assert outcome.goes_on == (not failure and took > 0.3)
        assert took < 0.5 + 3 * 0.5 + 1, "the longest that the next step was waited for"
        assert (worker.invoke(case(run), tmp_path).failure == "hang") == (took > 0.3)
    finally:
        worker.signal.signal(worker.signal.SIGPROF, kept)


def test_damage_that_a_sealed_format_accepts_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 0 with another result than the sound input's."""
    monkeypatch.setattr(worker.resource, "setrlimit", lambda *_: None)

    def reads() -> int:
        path = Path("a.json")
        if not path.is_file():
            return 1
        print(path.read_bytes())  # noqa: T201
        return 0

    for sealed in (True, False):
        toy = case(reads, sealed=sealed, result=output)
        runs = worker.Worker(tmp_path / str(sealed), "1", tmp_path / "kept", {"toy": toy})
        failures = {runs.run("toy", index).failure for index in range(10)}
        assert ("accepted" in failures) == sealed
        assert (tmp_path / "kept").exists()


def test_a_mutant_is_a_function_of_its_seed() -> None:
    """The same bytes again, and nearly always other ones than the sound file's."""
    sound = {
        ".json": b'{"a": [1, {"b": "c"}], "d": 2.5}',
        ".jsonl": b'{"a": 1}\n{"a": 2}\n',
        ".toml": b"a = 1\nb = 'c'\n[d]\ne = 2\n",
        ".safetensors": (12).to_bytes(8, "little") + b'{"a": [1,2]}' + bytes(64),
        ".csv": b"0F0,1F0\n0B0,,1\n",
    }
    for suffix, data in sound.items():
        changed = 0
        for index in range(80):
            first, again = (mutate(f"x{suffix}", data, random.Random(index)) for _ in range(2))
            assert first == again
            changed += first[1] != data
        assert changed > 70
    for mutation in {*BYTES, *(one for kind in BY_KIND.values() for one in kind)}:
        assert mutation.__doc__


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--case", "nothing/such", "--seconds", "1"), "no case's PACKAGE/NAME holds"),
        (("--case", "data_cases/learn", "--index", "1", "--seconds", "1"), "leave one of them out"),
    ],
)
def test_a_call_that_would_damage_nothing_is_refused(words: tuple[str, ...], why: str) -> None:
    """A misspelt case is exit code 2 and no success of nothing."""
    driver = Path(__file__).parent / "fuzz" / "driver.py"
    done = subprocess.run(
        [sys.executable, str(driver), *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert why in done.stderr
