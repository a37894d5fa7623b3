"""Run mutants of one package in this process, with one line of JSON per mutant.

`python tests/fuzz/worker.py MODULE INPUTS SEED FAILURES` reads lines `[CASE, INDEX]` and answers
with the outcome of that mutant. INPUTS is the folder of valid inputs; damaged files that fail are
saved in FAILURES. `[CASE, INDEX, true]` only saves the file.
"""

import contextlib
import importlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).parent.parent))

from fuzz.case import Case
from fuzz.mutations import mutate

MEMORY_BYTES = 2 << 30
CPU_LIMIT_S = 20.0
RUN_LIMIT_S = 8.0
"""CPU time limit of a training, after which it must still be making steps."""
CHECK_INTERVAL_S = 0.5
"""Time between two checks for another step."""
STEP_TIME_FACTOR = 3.0
"""Allowed duration of the next step, relative to the longest previous step."""
ADDRESS_SPACE_BYTES = 3 << 30
"""Additional address space of a mutant; allocators reserve more than they use."""


class Hang(BaseException):
    """The mutant exceeded its CPU time."""


class UnsoundError(Exception):
    """The valid input fails: the case is wrong, or the command has changed."""


@dataclass
class Outcome:
    """Outcome of one run."""

    exit_code: int = 0
    stdout: str = ""
    stderr: str = ""
    failure: str = ""
    """Empty, or `traceback`, `hang`, `memory`, `exit code`, `accepted`."""
    still_training: bool = False
    """The training was still making steps at its time limit."""
    cause: str = ""
    details: str = ""
    mutation: str = ""
    file: str = ""


@dataclass
class Worker:
    """Valid inputs and their results."""

    inputs: Path
    seed: str
    failures_folder: Path
    cases: dict[str, Case]
    results: dict[str, str] = field(default_factory=dict)
    unsound: set[str] = field(default_factory=set)

    def sound_folder(self, case: Case) -> Path:
        """Return the valid input; create and run it on the first call."""
        folder = self.inputs / case.name
        if case.name in self.results:
            return folder
        if case.name in self.unsound:
            raise UnsoundError("see the first mutant of this case")
        self.unsound.add(case.name)
        if not folder.exists():
            partial = folder.with_name(f"{case.name}.{os.getpid()}")
            partial.mkdir(parents=True)
            with working_directory(partial):
                case.make(partial)
            with contextlib.suppress(OSError):  # another worker created it first
                partial.rename(folder)
        with scratch(folder) as workdir:
            outcome = invoke(case, workdir)
            if outcome.exit_code != case.exit_code or outcome.failure:
                output = (outcome.stderr or outcome.stdout)[-2000:]
                raise UnsoundError(f"exit code {outcome.exit_code}: {output} {outcome.details}")
            self.results[case.name] = case.result(workdir, outcome.stdout)
        self.unsound.discard(case.name)
        return folder

    def run(self, name: str, index: int, save_only: bool = False) -> Outcome:
        """Create the mutant and run the command on it."""
        case = self.cases[name]
        valid_input = self.sound_folder(case)
        rng = random.Random(f"{self.seed}/{name}/{index}")
        with scratch(valid_input) as workdir:
            files = sorted({p for pattern in case.files for p in workdir.glob(pattern)})
            path = rng.choice([p for p in files if p.is_file()])
            mutation, data = mutate(path.name, path.read_bytes(), rng)
            write(path, mutation, data)
            outcome = Outcome(failure="kept") if save_only else invoke(case, workdir)
            missing = mutation == "missing" or not data  # an empty file is like a missing one
            checked = not _hang_location and case.sealed and not (case.may_be_missing and missing)
            if checked and outcome.exit_code == 0 and not outcome.failure:
                result = case.result(workdir, outcome.stdout)
                if result != self.results[name]:
                    outcome.failure, outcome.cause = "accepted", f"{path.name}"
                    outcome.details = f"valid: {self.results[name][:500]}\nmutant: {result[:500]}"
            outcome.mutation, outcome.file = mutation, str(path.relative_to(workdir))
            if outcome.failure and data is not None:
                saved = self.failures_folder / f"{name.replace(' ', '_')}-{index}-{path.name}"
                saved.parent.mkdir(parents=True, exist_ok=True)
                saved.write_bytes(data)
        return outcome


def write(path: Path, mutation: str, data: bytes | None) -> None:
    """Write the damaged file, or replace it by a folder or link."""
    path.unlink()
    if data is not None:
        path.write_bytes(data)
    elif mutation == "a folder":
        path.mkdir()
    elif mutation == "a link to itself":
        path.symlink_to(path.name)
    elif mutation == "two links in a circle":
        path.symlink_to(f"{path.name}.other")
        path.with_name(f"{path.name}.other").symlink_to(path.name)


@contextlib.contextmanager
def scratch(inputs: Path) -> Iterator[Path]:
    """Temporary copy of a valid input."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        shutil.copytree(inputs, folder / "in", symlinks=True)
        yield folder / "in"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def working_directory(folder: Path) -> Iterator[None]:
    """Change the working directory to a folder."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def invoke(case: Case, folder: Path) -> Outcome:
    """Run the command in a folder with resource limits and classify the outcome."""
    outcome = Outcome()
    with captured() as (stdout, stderr), working_directory(folder):
        peak_before = reset_peak()
        _hang_location.clear()
        _training[:] = [Training()] if case.trains else []
        signal.setitimer(signal.ITIMER_PROF, RUN_LIMIT_S if case.trains else CPU_LIMIT_S)
        try:
            outcome.exit_code = case.run()
        except SystemExit as stop:
            outcome.exit_code = stop.code if isinstance(stop.code, int) else int(bool(stop.code))
        except MemoryError:
            outcome.failure, outcome.cause = "memory", location(sys.exc_info()[2])
        except BaseException as error:
            outcome.failure = "traceback"
            outcome.cause = f"{type(error).__name__} in {location(error.__traceback__)}"
            outcome.details = traceback.format_exc()[-4000:]
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        increase = peak() - peak_before
    outcome.stdout, outcome.stderr = output_of(stdout), output_of(stderr)
    if _hang_location and any(training.still_training for training in _training):
        outcome.failure, outcome.exit_code, outcome.still_training = "", 0, True
    elif _hang_location:
        outcome.failure, outcome.cause = "hang", _hang_location[0]
    elif increase > MEMORY_BYTES:
        outcome.failure, outcome.cause = "memory", f"{increase >> 20} MiB"
    elif not outcome.failure and "Traceback (most recent call last)" in outcome.stderr:
        outcome.failure = "traceback"
        outcome.cause = "printed: " + outcome.stderr.strip().splitlines()[-1][:120]
        outcome.details = outcome.stderr[-4000:]
    elif not outcome.failure and outcome.exit_code not in (0, 1, 2):
        outcome.failure, outcome.cause = "exit code", str(outcome.exit_code)
    elif not outcome.failure and outcome.exit_code == 2 and not outcome.stderr.strip():
        outcome.failure, outcome.cause = "exit code", "2 without a message"
    return outcome


class Training:
    """Times of a training's optimizer steps, in seconds of CPU time.

    Output does not prove progress: it is rare, or precedes the first step. At its time limit, a
    training gets enough time to make another step.
    """

    running: "Training | None" = None

    def __init__(self) -> None:
        if Training.running is None:
            from torch.optim.optimizer import register_optimizer_step_post_hook

            register_optimizer_step_post_hook(lambda *_: Training.running.step())
        Training.running = self
        self.last = time.process_time()
        self.longest = 0.0
        self.steps = 0
        self.still_training = False
        self._steps_at_limit = -1
        self._deadline = 0.0

    def step(self) -> None:
        """Record an optimizer step."""
        cpu_s = time.process_time()
        self.longest = max(self.longest, cpu_s - self.last)
        self.steps, self.last = self.steps + 1, cpu_s

    def needs_more_time(self) -> bool:
        """Whether to wait longer for the next step; called at and after the time limit."""
        cpu_s = time.process_time()
        if self._steps_at_limit < 0:
            self._steps_at_limit = self.steps
            self._deadline = cpu_s + STEP_TIME_FACTOR * max(
                self.longest, cpu_s - self.last, CHECK_INTERVAL_S
            )
        self.still_training = self.steps > self._steps_at_limit
        return not self.still_training and cpu_s < self._deadline


@contextlib.contextmanager
def captured() -> Iterator[tuple[Path, Path]]:
    """Capture the output at the file descriptors, including output of C libraries."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-said-"))
    paths = folder / "out", folder / "err"
    saved = [os.dup(saved_descriptor) for saved_descriptor in (1, 2)]
    streams = sys.stdout, sys.stderr
    try:
        for descriptor, path in zip((1, 2), paths, strict=True):
            with open(path, "wb") as file:
                os.dup2(file.fileno(), descriptor)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        yield paths
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        sys.stdout, sys.stderr = streams
        for descriptor, saved_descriptor in zip((1, 2), saved, strict=True):
            os.dup2(saved_descriptor, descriptor)
            os.close(saved_descriptor)
        contents = [path.read_bytes()[-1_000_000:] for path in paths]
        shutil.rmtree(folder)
        _captured[:] = contents


_captured: list[bytes] = []
_hang_location: list[str] = []
_training: list[Training] = []
"""The running training, if the case trains."""


def output_of(path: Path) -> str:
    """Decoded output from a file of `captured`."""
    return _captured[0 if path.name == "out" else 1].decode(errors="replace")


def location(trace: object) -> str:
    """Innermost location in our code; without one, the innermost location."""
    frames = traceback.extract_tb(trace)  # type: ignore[arg-type]
    ours = [
        entry for entry in frames if "/ms_" in entry.filename and "/packages/" in entry.filename
    ]
    innermost = (ours or frames)[-1]
    parts = Path(innermost.filename).parts
    start = next((i for i, part in enumerate(parts) if part.startswith("ms_")), len(parts) - 1)
    return f"{'/'.join(parts[start:])}:{innermost.name}"


def hang(signum: int, frame: FrameType | None) -> None:
    """Abort the run, unless it is a training that may still make its next step."""
    if not _hang_location and any(training.needs_more_time() for training in _training):
        signal.setitimer(signal.ITIMER_PROF, CHECK_INTERVAL_S)
        return
    stack = traceback.extract_stack(frame)
    ours = [entry for entry in stack if "/packages/" in entry.filename]
    innermost = (ours or stack)[-1]
    _hang_location.append(f"{Path(innermost.filename).name}:{innermost.name}")
    signal.setitimer(signal.ITIMER_PROF, 1.0)  # again, in case the exception is swallowed
    raise Hang


def reset_peak() -> int:
    """Reset the peak memory and limit the address space."""
    Path("/proc/self/clear_refs").write_text("5")
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = pages * resource.getpagesize() + ADDRESS_SPACE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    return peak()


def peak() -> int:
    """Peak memory since the last reset, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) << 10
    return 0


def main() -> None:
    """Answer requests until the end of the input."""
    name, inputs, seed, failures_folder = sys.argv[1:5]
    cases: tuple[Case, ...] = importlib.import_module(f"fuzz.{name}").CASES
    worker = Worker(
        Path(inputs) / name, seed, Path(failures_folder) / name, {case.name: case for case in cases}
    )
    signal.signal(signal.SIGPROF, hang)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing but answers on the pipe
    for line in sys.stdin:
        case, index, *save_only = json.loads(line)
        try:
            outcome = worker.run(case, index, bool(save_only))
        except Exception:
            outcome = Outcome(failure="unsound", cause=case, details=traceback.format_exc())
        record = asdict(outcome)
        record.update(stdout=outcome.stdout[-500:], stderr=outcome.stderr[-1000:])
        answers.write(json.dumps(record) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
