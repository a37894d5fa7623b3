"""Runs thousands of damaged inputs through the commands of the six packages.

    nox -s fuzz -- --mutants 3000 --seed 7
    nox -s fuzz -- --case data_cases --seconds 600
    python tests/fuzz/driver.py --case "ms_data/build lines" --index 12

A mutant fails on a traceback, 20 s of processor time, 2 GiB, an exit code other than 0, 1 and 2,
or, where the format is sealed, on exit code 0 with another result than the sound input's. Each
mutant is a pure function of the seed, its case and its index. Inputs that fail are kept.
"""

import argparse
import importlib
import importlib.util
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from queue import Empty, Queue
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from fuzz.case import Case

PACKAGES = (
    "compress_cases",
    "align_cases",
    "parallel_cases",
    "data_cases",
    "profile_cases",
    "kernels_cases",
)
"""Slow ones first."""
WALL_LIMIT_S = 120.0
ONE_WORKER = 250
"""Mutants after which a worker is replaced, so that what one leaves behind stays small."""

TIMED_BATCH = 100
"""Mutants between two looks at the clock."""

Task = tuple[str, int]
Record = dict[str, Any]


def plan(packages: Sequence[str], mutants: int, only: str) -> list[tuple[str, list[Task]]]:
    """Batches for workers: a package's cases by their shares, one package a batch."""
    cases = chosen(packages, only)
    whole = sum(case.share for _, case in cases)
    batches: list[tuple[str, list[Task]]] = []
    for package in packages:
        tasks = [
            (case.name, index)
            for owner, case in cases
            if owner == package
            for index in range(max(1, round(mutants * case.share / whole)))
        ]
        starts = range(0, len(tasks), ONE_WORKER)
        batches += [(package, tasks[start : start + ONE_WORKER]) for start in starts]
    return batches


def chosen(packages: Sequence[str], only: str) -> list[tuple[str, Case]]:
    """The cases that are here, each with the module that holds it."""
    return [
        (package, case)
        for package in packages
        for case in importlib.import_module(f"fuzz.{package}").CASES
        if only in f"{package}/{case.name}" and _is_here(case)
    ]


def _is_here(case: Case) -> bool:
    if case.needs and importlib.util.find_spec(case.needs) is None:
        print(f"{case.name!r} is left out: there is no {case.needs}")
        return False
    return True


class Session:
    """The workers, and what they found."""

    def __init__(self, seed: str, sound: Path, keep: Path) -> None:
        self.seed, self.sound, self.keep = seed, sound, keep
        self.failures: list[Record] = []
        self.codes: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self.done = 0
        self._lock = threading.Lock()

    def work(self, batches: "Queue[tuple[str, list[Task]]]") -> None:
        """Takes batches until there are none."""
        while True:
            try:
                package, tasks = batches.get_nowait()
            except Empty:
                return
            left = list(tasks)
            while left:
                left = self._batch(package, left)

    def work_for(self, seconds: float, cases: "Queue[tuple[str, Case]]") -> None:
        """Takes cases until there are none, and gives each so long."""
        while True:
            try:
                package, case = cases.get_nowait()
            except Empty:
                return
            began, first = time.monotonic(), 0
            while (spent := time.monotonic() - began) < seconds:
                left: list[Task] = [(case.name, first + n) for n in range(TIMED_BATCH)]
                first += TIMED_BATCH
                while left:
                    left = self._batch(package, left)
            with self._lock:
                print(f"{package}/{case.name}: {first} mutants in {spent:.0f} s", flush=True)

    def _batch(self, package: str, tasks: list[Task]) -> list[Task]:
        """Runs tasks in one worker; gives what is left when it died."""
        with tempfile.TemporaryFile() as errors:
            process = self._worker(package, errors)
            try:
                for number, task in enumerate(tasks):
                    answer = _ask(process, task)
                    if answer is None:
                        self._note(package, task, _death(process.wait(), errors))
                        return tasks[number + 1 :]
                    self._note(package, task, answer)
                return []
            finally:
                process.kill()
                process.wait()

    def _note(self, package: str, task: Task, record: Record) -> None:
        case, index = task
        with self._lock:
            self.done += 1
            ended = "still training" if record.get("goes_on") else str(record["exit_code"])
            self.codes[package][record["failure"] or ended] += 1
            if not record["failure"]:
                return
            record.update(package=package, case=case, index=index, seed=self.seed)
            self.failures.append(record)
            told = self.keep / package / f"{case.replace(' ', '_')}-{index}.json"
            told.parent.mkdir(parents=True, exist_ok=True)
            told.write_text(json.dumps(record, indent=1))

    def keep_inputs(self) -> None:
        """Keeps the files that killed a worker, which could not do so itself."""
        for one in self.failures:
            if one["mutation"] == "?":
                request = json.dumps([one["case"], one["index"], True]) + "\n"
                with tempfile.TemporaryFile() as errors:
                    process = self._worker(one["package"], errors)
                    process.communicate(request)

    def _worker(self, package: str, errors: IO[bytes]) -> "subprocess.Popen[str]":
        script = str(Path(__file__).parent / "worker.py")
        return subprocess.Popen(
            [sys.executable, script, package, str(self.sound), self.seed, str(self.keep)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )

    def causes(self) -> dict[tuple[str, str, str], list[Record]]:
        """Failures by package, kind and cause."""
        found: dict[tuple[str, str, str], list[Record]] = defaultdict(list)
        for one in self.failures:
            found[one["package"], one["failure"], one["cause"]].append(one)
        return dict(sorted(found.items()))


def _ask(process: "subprocess.Popen[str]", task: Task) -> Record | None:
    """The worker's answer; None where it dies or gives none in time."""
    assert process.stdin is not None
    assert process.stdout is not None
    timer = threading.Timer(WALL_LIMIT_S, process.kill)
    timer.start()
    try:
        process.stdin.write(json.dumps(task) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except OSError:
        return None
    finally:
        timer.cancel()
    answer: Record | None = json.loads(line) if line else None
    return answer


def _death(status: int, errors: IO[bytes]) -> Record:
    errors.seek(0)
    said = errors.read().decode(errors="replace").strip()[-3000:]
    kind = "hang" if status == -9 else "died"
    last = said.splitlines()[-1][:200] if said else ""
    cause = f"status {status}" if status < 0 else last
    return {"failure": kind, "cause": cause, "details": said, "mutation": "?", "file": "?"}


def main() -> int:
    """Plans, runs and reports; 1 where a mutant failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mutants", type=int, default=3000)
    parser.add_argument("--seconds", type=float, help="so long a case, instead of a number")
    parser.add_argument("--seed", default="", help="drawn and printed where it is not given")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--case", default="", help="cases whose PACKAGE/NAME holds this")
    parser.add_argument("--index", type=int, help="this mutant alone, of the case PACKAGE/NAME")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-failures"))
    options = parser.parse_args()
    if options.index is not None and options.seconds is not None:
        parser.error("--index runs one mutant and --seconds many; leave one of them out")
    work = _work(options)
    if not work:
        parser.error(f"no case's PACKAGE/NAME holds {options.case!r}; leave --case out for all")
    seed = options.seed or str(random.SystemRandom().randrange(10**6))
    print(f"seed {seed}", flush=True)
    queue: Queue[Any] = Queue()
    for one in work:
        queue.put(one)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzz-sound-") as sound:
        session = Session(seed, Path(sound), options.keep.absolute())
        call: dict[str, Any] = {"target": session.work, "args": (queue,)}
        if options.seconds is not None:
            call = {"target": session.work_for, "args": (options.seconds, queue)}
        threads = [threading.Thread(**call) for _ in range(options.workers)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            threads[0].join(30) if threads[0].is_alive() else threads[-1].join(30)
            found = f"{session.done} done, {len(session.failures)} failed"
            print(f"{time.monotonic() - began:.0f} s: {found}", flush=True)
        session.keep_inputs()
    return report(session)


def _work(options: argparse.Namespace) -> Sequence[Any]:
    """What workers take one by one: cases where each is given a time, batches otherwise."""
    if options.index is not None:
        package, _, name = options.case.partition("/")
        return [(package, [(name, options.index)])]
    if options.seconds is not None:
        return chosen(PACKAGES, options.case)
    return plan(PACKAGES, options.mutants, options.case)


def report(session: Session) -> int:
    """Prints exit codes by package and failures by cause."""
    for package, codes in sorted(session.codes.items()):
        told = ", ".join(f"{count} x {code}" for code, count in sorted(codes.items()))
        print(f"{package}: {told}")
    for (package, kind, cause), records in session.causes().items():
        one = records[0]
        print(f"\n{package}: {kind}, {len(records)} x: {cause}")
        print(f"  {one['file']} ({one['mutation']}), case {one['case']!r}")
        print(
            f"  python tests/fuzz/driver.py --seed {session.seed} "
            f"--case '{package}/{one['case']}' --index {one['index']}"
        )
    print(f"\nseed {session.seed}: {session.done} mutants, {len(session.failures)} failed")
    if session.failures:
        print(f"what failed is kept in {session.keep}")
    return 1 if session.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
