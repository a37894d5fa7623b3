"""The driver of `nox -s fuzz` detects every type of failure."""

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
from .fuzz.mutations import BY_SUFFIX, BYTES, mutate


def case(run: object, **fields: object) -> Case:
    """A case with one input file."""

    def make(folder: Path) -> None:
        (folder / "a.json").write_text('{"a": [1, 2, 3]}')

    return Case(name="toy", make=make, files=("*",), run=run, **fields)  # type: ignore[arg-type]


def failure_of(tmp_path: Path, run: object, **fields: object) -> tuple[str, str]:
    """Failure and cause of running a command."""
    outcome = worker.invoke(case(run, **fields), tmp_path)
    return outcome.failure, outcome.cause


def test_every_type_of_failure_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit codes 0, 1 and 2 with a message are not failures."""

    def raises() -> int:
        raise RecursionError

    def exits() -> int:
        raise SystemExit(3)

    def prints() -> int:
        import sys

        sys.stderr.write("Traceback (most recent call last)\nKeyError: 1\n")
        return 1

    def grows() -> int:
        return len(bytearray(64 << 20)) * 0

    def hangs() -> int:
        while True:
            use_cpu(0.05)

    def explains() -> int:
        import sys

        print("a.json: not JSON; write it again", file=sys.stderr)  # noqa: T201
        return 2

    monkeypatch.setattr(worker, "MEMORY_BYTES", 32 << 20)
    monkeypatch.setattr(worker, "CPU_LIMIT_S", 0.2)
    monkeypatch.setattr(worker.resource, "setrlimit", lambda *_: None)  # this process continues
    previous = worker.signal.signal(worker.signal.SIGPROF, worker.hang)
    try:
        assert failure_of(tmp_path, raises)[0] == "traceback"
        assert failure_of(tmp_path, exits) == ("exit code", "3")
        assert failure_of(tmp_path, prints)[0] == "traceback"
        assert failure_of(tmp_path, grows)[0] == "memory"
        start_s = time.process_time()
        assert failure_of(tmp_path, hangs)[0] == "hang"
        assert time.process_time() - start_s < 2
        assert failure_of(tmp_path, lambda: 2) == ("exit code", "2 without a message")
        for fine in (lambda: 0, lambda: 1, explains):
            assert failure_of(tmp_path, fine)[0] == ""
    finally:
        worker.signal.signal(worker.signal.SIGPROF, previous)


def use_cpu(seconds: float) -> None:
    """Compute, then release the lock of the interpreter, as all programs do at some time.

    A signal that another thread received may only be handled then.
    """
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass
    time.sleep(0)


def trains(steps: int, step_s: float, then: str = "") -> int:
    """A training of `steps` steps that prints and writes, and then may hang."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    Path("out").mkdir(exist_ok=True)
    Path("out/events").touch()
    for step in range(1, steps + 1):
        use_cpu(step_s)
        optimizer.step()
        print(f"step {step}/{steps}  loss 5.7", file=sys.stderr)  # noqa: T201
    while then:
        use_cpu(0.05)
    return 0


@pytest.mark.parametrize(
    ("run", "failure"),
    [
        (lambda: trains(2**32, 0.01), ""),  # large settings are not a fault
        pytest.param(lambda: trains(2**32, 0.3), "", marks=pytest.mark.slow),
        (lambda: trains(3, 0.01), ""),
        (lambda: trains(0, 0.0, "hangs"), "hang"),
        pytest.param(lambda: trains(1, 0.01, "hangs"), "hang", marks=pytest.mark.slow),
        (lambda: trains(3, 0.1, "hangs"), "hang"),
    ],
)
def test_a_training_at_its_limit_must_still_be_making_steps(
    run: Callable[[], int], failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training that hangs after a step, or after writing files, has failed.

    As a command that does not train, all but the short one hang.
    """
    for name, seconds in (("RUN_LIMIT_S", 0.5), ("CPU_LIMIT_S", 0.5), ("CHECK_INTERVAL_S", 0.05)):
        monkeypatch.setattr(worker, name, seconds)
    monkeypatch.setattr(worker.resource, "setrlimit", lambda *_: None)  # this process continues
    previous = worker.signal.signal(worker.signal.SIGPROF, worker.hang)
    monkeypatch.chdir(tmp_path)
    trains(1, 0.0)  # the first step imports parts of torch, which takes seconds
    try:
        start_s = time.process_time()
        outcome = worker.invoke(case(run, trains=True), tmp_path)
        elapsed_s = time.process_time() - start_s
        assert outcome.failure == failure
        assert outcome.still_training == (not failure and elapsed_s > 0.3)
        assert elapsed_s < 0.5 + 3 * 0.5 + 1, "limit plus the wait for the next step"
        assert (worker.invoke(case(run), tmp_path).failure == "hang") == (elapsed_s > 0.3)
    finally:
        worker.signal.signal(worker.signal.SIGPROF, previous)


def test_damage_that_a_sealed_format_accepts_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 0 with a result that differs from the valid input's."""
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
    """The same bytes each time, which nearly always differ from the valid file's."""
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
            first, second = (mutate(f"x{suffix}", data, random.Random(index)) for _ in range(2))
            assert first == second
            changed += first[1] != data
        assert changed > 70
    for mutation in {
        *BYTES,
        *(mutation for mutations in BY_SUFFIX.values() for mutation in mutations),
    }:
        assert mutation.__doc__


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--case", "nothing/such", "--seconds", "1"), "no PACKAGE/NAME contains"),
        (("--case", "data_cases/learn", "--index", "1", "--seconds", "1"), "drop one of them"),
    ],
)
def test_a_call_without_mutants_is_rejected(arguments: tuple[str, ...], message: str) -> None:
    """A misspelled case is exit code 2, not an empty success."""
    driver = Path(__file__).parent / "fuzz" / "driver.py"
    result = subprocess.run(
        [sys.executable, str(driver), *arguments], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert message in result.stderr
