"""Run thousands of damaged inputs through the commands of the six packages.

    nox -s fuzz -- --mutants 3000 --seed 7
    nox -s fuzz -- --case data_cases --seconds 600
    python tests/fuzz/driver.py --case "ms_data/build lines" --index 12

A mutant fails on a traceback, 20 s of CPU time, 2 GiB of memory, an exit code other than 0, 1 and
2, or, for a sealed format, on exit code 0 with a result that differs from the valid input's. Each
mutant is a pure function of the seed, its case and its index. Failing inputs are saved.
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
"""Slowest first."""
WALL_LIMIT_S = 120.0
MUTANTS_PER_WORKER = 250
"""Mutants after which a worker is replaced, to limit leaks."""

TIMED_BATCH = 100
"""Mutants between two checks of the time."""

Task = tuple[str, int]
Record = dict[str, Any]


def plan(packages: Sequence[str], mutants: int, only: str) -> list[tuple[str, list[Task]]]:
    """Batches for workers: mutants per case by weight, one package per batch."""
    cases = selected_cases(packages, only)
    total_weight = sum(case.weight for _, case in cases)
    batches: list[tuple[str, list[Task]]] = []
    for package in packages:
        tasks = [
            (case.name, index)
            for owner, case in cases
            if owner == package
            for index in range(max(1, round(mutants * case.weight / total_weight)))
        ]
        starts = range(0, len(tasks), MUTANTS_PER_WORKER)
        batches += [(package, tasks[start : start + MUTANTS_PER_WORKER]) for start in starts]
    return batches


def selected_cases(packages: Sequence[str], only: str) -> list[tuple[str, Case]]:
    """Available cases that match `only`, each with its module."""
    return [
        (package, case)
        for package in packages
        for case in importlib.import_module(f"fuzz.{package}").CASES
        if only in f"{package}/{case.name}" and _is_available(case)
    ]


def _is_available(case: Case) -> bool:
    if case.needs and importlib.util.find_spec(case.needs) is None:
        print(f"skipping {case.name!r}: {case.needs} is not installed")
        return False
    return True


class Session:
    """Workers, and the results of their mutants."""

    def __init__(self, seed: str, sound: Path, keep: Path) -> None:
        self.seed, self.sound, self.keep = seed, sound, keep
        self.failures: list[Record] = []
        self.codes: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self.done = 0
        self._lock = threading.Lock()

    def work(self, batches: "Queue[tuple[str, list[Task]]]") -> None:
        """Run batches until the queue is empty."""
        while True:
            try:
                package, tasks = batches.get_nowait()
            except Empty:
                return
            remaining = list(tasks)
            while remaining:
                remaining = self._batch(package, remaining)

    def work_for(self, seconds: float, cases: "Queue[tuple[str, Case]]") -> None:
        """Run cases until the queue is empty, each for `seconds`."""
        while True:
            try:
                package, case = cases.get_nowait()
            except Empty:
                return
            start_s, first = time.monotonic(), 0
            while (elapsed_s := time.monotonic() - start_s) < seconds:
                remaining: list[Task] = [(case.name, first + n) for n in range(TIMED_BATCH)]
                first += TIMED_BATCH
                while remaining:
                    remaining = self._batch(package, remaining)
            with self._lock:
                print(f"{package}/{case.name}: {first} mutants in {elapsed_s:.0f} s", flush=True)

    def _batch(self, package: str, tasks: list[Task]) -> list[Task]:
        """Run tasks in one worker; return the remaining tasks if it died."""
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
            result = "still training" if record.get("still_training") else str(record["exit_code"])
            self.codes[package][record["failure"] or result] += 1
            if not record["failure"]:
                return
            record.update(package=package, case=case, index=index, seed=self.seed)
            self.failures.append(record)
            path = self.keep / package / f"{case.replace(' ', '_')}-{index}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(record, indent=1))

    def save_inputs(self) -> None:
        """Save the inputs that killed a worker, which could not save them itself."""
        for record in self.failures:
            if record["mutation"] == "?":
                request = json.dumps([record["case"], record["index"], True]) + "\n"
                with tempfile.TemporaryFile() as errors:
                    process = self._worker(record["package"], errors)
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
        """Group the failures by package, type and cause."""
        records: dict[tuple[str, str, str], list[Record]] = defaultdict(list)
        for record in self.failures:
            records[record["package"], record["failure"], record["cause"]].append(record)
        return dict(sorted(records.items()))


def _ask(process: "subprocess.Popen[str]", task: Task) -> Record | None:
    """Return the worker's answer; None if it dies or times out."""
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
    text = errors.read().decode(errors="replace").strip()[-3000:]
    failure = "hang" if status == -9 else "died"
    last_line = text.splitlines()[-1][:200] if text else ""
    cause = f"status {status}" if status < 0 else last_line
    return {"failure": failure, "cause": cause, "details": text, "mutation": "?", "file": "?"}


def main() -> int:
    """Plan, run and report; return 1 if a mutant failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mutants", type=int, default=3000)
    parser.add_argument("--seconds", type=float, help="time per case, instead of a number")
    parser.add_argument("--seed", default="", help="default: random, and printed")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--case", default="", help="only cases whose PACKAGE/NAME contains this")
    parser.add_argument("--index", type=int, help="only this mutant of the case PACKAGE/NAME")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-failures"))
    options = parser.parse_args()
    if options.index is not None and options.seconds is not None:
        parser.error("--index and --seconds cannot be combined; drop one of them")
    work = _work(options)
    if not work:
        parser.error(f"no PACKAGE/NAME contains {options.case!r}; omit --case to run all cases")
    seed = options.seed or str(random.SystemRandom().randrange(10**6))
    print(f"seed {seed}", flush=True)
    queue: Queue[Any] = Queue()
    for item in work:
        queue.put(item)
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzz-sound-") as sound:
        session = Session(seed, Path(sound), options.keep.absolute())
        target: dict[str, Any] = {"target": session.work, "args": (queue,)}
        if options.seconds is not None:
            target = {"target": session.work_for, "args": (options.seconds, queue)}
        threads = [threading.Thread(**target) for _ in range(options.workers)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            threads[0].join(30) if threads[0].is_alive() else threads[-1].join(30)
            progress = f"{session.done} done, {len(session.failures)} failed"
            print(f"{time.monotonic() - start_s:.0f} s: {progress}", flush=True)
        session.save_inputs()
    return report(session)


def _work(options: argparse.Namespace) -> Sequence[Any]:
    """Items of the work queue: cases with --seconds, batches otherwise."""
    if options.index is not None:
        package, _, name = options.case.partition("/")
        return [(package, [(name, options.index)])]
    if options.seconds is not None:
        return selected_cases(PACKAGES, options.case)
    return plan(PACKAGES, options.mutants, options.case)


def report(session: Session) -> int:
    """Print exit codes by package and failures by cause."""
    for package, codes in sorted(session.codes.items()):
        counts = ", ".join(f"{count} x {code}" for code, count in sorted(codes.items()))
        print(f"{package}: {counts}")
    for (package, failure, cause), records in session.causes().items():
        record = records[0]
        print(f"\n{package}: {failure}, {len(records)} x: {cause}")
        print(f"  {record['file']} ({record['mutation']}), case {record['case']!r}")
        print(
            f"  python tests/fuzz/driver.py --seed {session.seed} "
            f"--case '{package}/{record['case']}' --index {record['index']}"
        )
    print(f"\nseed {session.seed}: {session.done} mutants, {len(session.failures)} failed")
    if session.failures:
        print(f"failing inputs are in {session.keep}")
    return 1 if session.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
