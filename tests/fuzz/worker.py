"""Runs mutants of one package, one after another, in this process; a line of JSON for each.

`python tests/fuzz/worker.py MODULE SOUND SEED KEEP`: reads lines `[CASE, INDEX]`, answers what
became of that mutant. SOUND is the folder where sound inputs are kept; damaged files that fail go
to KEEP. After `[CASE, INDEX, true]` the file is kept and nothing run.
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
"""For a training, which damaged settings may make long: it must then be making steps still."""
LOOK_S = 0.5
"""Between two looks whether another step was made."""
LONGER = 3.0
"""Times as long as a step of a training has taken that its next one may take."""
ADDRESSES_BYTES = 3 << 30
"""Address space that a mutant may take beyond what the process has: allocators take some unused."""


class Hang(BaseException):
    """The mutant has used up its processor time."""


class UnsoundError(Exception):
    """The sound input does not do: the case is wrong, or its package's command has changed."""


@dataclass
class Outcome:
    """What became of one run."""

    exit_code: int = 0
    printed: str = ""
    errors: str = ""
    failure: str = ""
    """Empty, or `traceback`, `hang`, `memory`, `exit code`, `accepted`."""
    goes_on: bool = False
    """A training that was still making steps at its limit, and was ended."""
    cause: str = ""
    details: str = ""
    mutation: str = ""
    file: str = ""


@dataclass
class Worker:
    """Sound inputs that were made, and their results."""

    sound: Path
    seed: str
    keep: Path
    cases: dict[str, Case]
    results: dict[str, str] = field(default_factory=dict)
    unsound: set[str] = field(default_factory=set)

    def sound_folder(self, case: Case) -> Path:
        """The sound input, made and run at the first call."""
        folder = self.sound / case.name
        if case.name in self.results:
            return folder
        if case.name in self.unsound:
            raise UnsoundError("see the first mutant of this case")
        self.unsound.add(case.name)
        if not folder.exists():
            partial = folder.with_name(f"{case.name}.{os.getpid()}")
            partial.mkdir(parents=True)
            with changed_to(partial):
                case.make(partial)
            with contextlib.suppress(OSError):  # another worker was first
                partial.rename(folder)
        with scratch(folder) as place:
            outcome = invoke(case, place)
            if outcome.exit_code != case.exit_code or outcome.failure:
                said = (outcome.errors or outcome.printed)[-2000:]
                raise UnsoundError(f"exit code {outcome.exit_code}: {said} {outcome.details}")
            self.results[case.name] = case.result(place, outcome.printed)
        self.unsound.discard(case.name)
        return folder

    def run(self, name: str, index: int, only_keep: bool = False) -> Outcome:
        """Makes the mutant and runs the command on it."""
        case = self.cases[name]
        sound = self.sound_folder(case)
        rng = random.Random(f"{self.seed}/{name}/{index}")
        with scratch(sound) as place:
            files = sorted({p for pattern in case.files for p in place.glob(pattern)})
            path = rng.choice([p for p in files if p.is_file()])
            what, data = mutate(path.name, path.read_bytes(), rng)
            write(path, what, data)
            outcome = Outcome(failure="kept") if only_keep else invoke(case, place)
            missing = what == "missing" or not data  # an empty file is one that just began
            checked = not _hung and case.sealed and not (case.one_may_miss and missing)
            if checked and outcome.exit_code == 0 and not outcome.failure:
                found = case.result(place, outcome.printed)
                if found != self.results[name]:
                    outcome.failure, outcome.cause = "accepted", f"{path.name}"
                    outcome.details = f"sound: {self.results[name][:500]}\nfound: {found[:500]}"
            outcome.mutation, outcome.file = what, str(path.relative_to(place))
            if outcome.failure and data is not None:
                kept = self.keep / f"{name.replace(' ', '_')}-{index}-{path.name}"
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_bytes(data)
        return outcome


def write(path: Path, what: str, data: bytes | None) -> None:
    """Puts the damaged file, or what stands in its place."""
    path.unlink()
    if data is not None:
        path.write_bytes(data)
    elif what == "a folder":
        path.mkdir()
    elif what == "a link to itself":
        path.symlink_to(path.name)
    elif what == "two links in a circle":
        path.symlink_to(f"{path.name}.other")
        path.with_name(f"{path.name}.other").symlink_to(path.name)


@contextlib.contextmanager
def scratch(sound: Path) -> Iterator[Path]:
    """A copy of a sound input."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        shutil.copytree(sound, folder / "in", symlinks=True)
        yield folder / "in"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def changed_to(folder: Path) -> Iterator[None]:
    """The folder is the current one."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def invoke(case: Case, folder: Path) -> Outcome:
    """Runs the command in a folder, under limits, and says how it ended."""
    outcome = Outcome()
    with captured() as (printed, errors), changed_to(folder):
        before = reset_peak()
        _hung.clear()
        _training[:] = [Training()] if case.trains else []
        signal.setitimer(signal.ITIMER_PROF, RUN_LIMIT_S if case.trains else CPU_LIMIT_S)
        try:
            outcome.exit_code = case.run()
        except SystemExit as end:
            outcome.exit_code = end.code if isinstance(end.code, int) else int(bool(end.code))
        except MemoryError:
            outcome.failure, outcome.cause = "memory", where(sys.exc_info()[2])
        except BaseException as error:
            outcome.failure = "traceback"
            outcome.cause = f"{type(error).__name__} in {where(error.__traceback__)}"
            outcome.details = traceback.format_exc()[-4000:]
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        used = peak() - before
    outcome.printed, outcome.errors = text(printed), text(errors)
    if _hung and any(training.goes_on for training in _training):
        outcome.failure, outcome.exit_code, outcome.goes_on = "", 0, True
    elif _hung:
        outcome.failure, outcome.cause = "hang", _hung[0]
    elif used > MEMORY_BYTES:
        outcome.failure, outcome.cause = "memory", f"{used >> 20} MiB"
    elif not outcome.failure and "Traceback (most recent call last)" in outcome.errors:
        outcome.failure = "traceback"
        outcome.cause = "printed: " + outcome.errors.strip().splitlines()[-1][:120]
        outcome.details = outcome.errors[-4000:]
    elif not outcome.failure and outcome.exit_code not in (0, 1, 2):
        outcome.failure, outcome.cause = "exit code", str(outcome.exit_code)
    elif not outcome.failure and outcome.exit_code == 2 and not outcome.errors.strip():
        outcome.failure, outcome.cause = "exit code", "2 without a word"
    return outcome


class Training:
    """The steps of a training, by when its optimizer made them, in seconds of processor time.

    What it prints or writes is no proof that it goes on: that comes now and then, or comes before
    the first step. A training that is at its limit is given the time that a step of it may take to
    make another one.
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
        self.goes_on = False
        self._seen = -1
        self._until = 0.0

    def step(self) -> None:
        """Note that one was made."""
        now = time.process_time()
        self.longest = max(self.longest, now - self.last)
        self.steps, self.last = self.steps + 1, now

    def may_go_on(self) -> bool:
        """Whether the next step is to be waited for, at a look at or beyond the limit."""
        now = time.process_time()
        if self._seen < 0:
            self._seen = self.steps
            self._until = now + LONGER * max(self.longest, now - self.last, LOOK_S)
        self.goes_on = self.steps > self._seen
        return not self.goes_on and now < self._until


@contextlib.contextmanager
def captured() -> Iterator[tuple[Path, Path]]:
    """What is printed, also by libraries that know no sys.stdout."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-said-"))
    paths = folder / "out", folder / "err"
    kept = [os.dup(one) for one in (1, 2)]
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
        for descriptor, one in zip((1, 2), kept, strict=True):
            os.dup2(one, descriptor)
            os.close(one)
        said = [path.read_bytes()[-1_000_000:] for path in paths]
        shutil.rmtree(folder)
        _said[:] = said


_said: list[bytes] = []
_hung: list[str] = []
_training: list[Training] = []
"""The one that runs, if the case is one."""


def text(path: Path) -> str:
    """What a file of `captured` held."""
    return _said[0 if path.name == "out" else 1].decode(errors="replace")


def where(trace: object) -> str:
    """The innermost place of our own code, and the innermost of all."""
    frames = traceback.extract_tb(trace)  # type: ignore[arg-type]
    own = [one for one in frames if "/ms_" in one.filename and "/packages/" in one.filename]
    last = (own or frames)[-1]
    parts = Path(last.filename).parts
    start = next((i for i, part in enumerate(parts) if part.startswith("ms_")), len(parts) - 1)
    return f"{'/'.join(parts[start:])}:{last.name}"


def hang(number: int, frame: FrameType | None) -> None:
    """Ends the run where it stands, unless it is a training whose next step may come."""
    if not _hung and any(training.may_go_on() for training in _training):
        signal.setitimer(signal.ITIMER_PROF, LOOK_S)
        return
    stack = traceback.extract_stack(frame)
    own = [one for one in stack if "/packages/" in one.filename]
    last = (own or stack)[-1]
    _hung.append(f"{Path(last.filename).name}:{last.name}")
    signal.setitimer(signal.ITIMER_PROF, 1.0)  # again, where it was swallowed
    raise Hang


def reset_peak() -> int:
    """Starts a new measurement of memory, and limits the address space."""
    Path("/proc/self/clear_refs").write_text("5")
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = pages * resource.getpagesize() + ADDRESSES_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    return peak()


def peak() -> int:
    """The most memory since the last reset, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) << 10
    return 0


def main() -> None:
    """Answers requests until there are no more."""
    name, sound, seed, keep = sys.argv[1:5]
    found: tuple[Case, ...] = importlib.import_module(f"fuzz.{name}").CASES
    worker = Worker(
        Path(sound) / name, seed, Path(keep) / name, {case.name: case for case in found}
    )
    signal.signal(signal.SIGPROF, hang)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing but answers on the pipe
    for line in sys.stdin:
        case, index, *only_keep = json.loads(line)
        try:
            outcome = worker.run(case, index, bool(only_keep))
        except Exception:
            outcome = Outcome(failure="unsound", cause=case, details=traceback.format_exc())
        said = asdict(outcome)
        said.update(printed=outcome.printed[-500:], errors=outcome.errors[-1000:])
        answers.write(json.dumps(said) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
