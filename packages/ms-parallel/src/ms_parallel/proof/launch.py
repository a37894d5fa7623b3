"""Starts the processes of a proof on this machine, and collects what they found."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from time import monotonic, sleep

import msgspec
import torch.distributed as dist

from ms_parallel.proof.records import Case, Counterexample, Job, Outcome

QUIET_S = 60.0
"""Seconds after which processes that finish no case and hardly compute are stopped."""
HARDLY = 0.02
"""Share of one core below which all processes together hardly compute: each waits for another."""
CASE_CPU_S = 600.0
"""Processor seconds of all processes together for one case, after which they are stopped."""


def run_cases(job: Job, folder: Path, done: Callable[[Outcome], None]) -> Iterator[Outcome]:
    """Run the cases of a job, all of as many processes, and give each one's outcome.

    Processes that fail or hang are stopped; their case says so, and the rest is run by new ones.

    Args:
        job: its cases are all of the same number of processes.
        folder: for the job, results and what is saved; the reference stands there.
        done: called with each outcome as it is known.
    """
    left = dict(job.cases)
    while left:
        why = _run(msgspec.structs.replace(job, cases=left), folder, next(iter(left.values())))
        for number, case in list(left.items()):
            outcome = _collect(number, case, folder)
            if outcome is None:
                if why is None:  # it ended without a word, and without this case
                    why = "the processes ended early"
                what = Counterexample(check="run", what=why)
                outcome = Outcome(case=case, checks=("run",), found=(what,))
                why = None
                del left[number]
                done(outcome)
                yield outcome
                break
            del left[number]
            done(outcome)
            yield outcome


def _run(job: Job, folder: Path, case: Case) -> str | None:
    """Start the processes and wait; returns why they were stopped, or None."""
    (folder / "job.json").write_bytes(msgspec.json.encode(job))
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    with ExitStack() as stack:
        logs = [folder / f"log.{rank}" for rank in range(case.processes)]
        started = []
        for rank, log in enumerate(logs):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(case.processes),
                "LOCAL_WORLD_SIZE": str(case.processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "OMP_NUM_THREADS": "1",
            }
            process = subprocess.Popen(
                [sys.executable, "-m", "ms_parallel.proof.worker", str(folder)],
                env=_environment(environment),
                stdin=subprocess.DEVNULL,
                stdout=stack.enter_context(log.open("wb")),
                stderr=subprocess.STDOUT,
            )
            stack.callback(_stop, process)
            started.append(process)
        return _wait(started, logs, job, folder)


def _environment(launched: Mapping[str, str]) -> dict[str, str]:
    paths = os.pathsep.join(part for part in (str(Path.cwd()), *sys.path) if part)
    return {**os.environ, "PYTHONPATH": paths, **launched}


def _stop(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    process.wait()


def _wait(
    started: list["subprocess.Popen[bytes]"], logs: list[Path], job: Job, folder: Path
) -> str | None:
    finished, quiet = -1, monotonic()
    begun = used = 0.0  # processor seconds when the case began, and when `quiet` did
    while True:
        codes = [process.poll() for process in started]
        for rank, code in enumerate(codes):
            if code:
                sleep(0.5)  # let the others write why they failed
                return f"rank {rank} failed: {_last_line(logs[rank]) or f'exit code {code}'}"
        if all(code == 0 for code in codes):
            return None
        count = sum(1 for number in job.cases if (folder / f"{number}.0.json").exists())
        if count != finished:
            finished, quiet = count, monotonic()
            begun = used = _processor_seconds(started)
        if monotonic() - quiet > QUIET_S:
            now = _processor_seconds(started)
            if 0 <= now - used < HARDLY * QUIET_S:  # less, where one has just ended
                return f"nothing came for {QUIET_S:.0f} s: a rank waits for another"
            if now - begun > CASE_CPU_S:
                return f"nothing came in {CASE_CPU_S:.0f} processor seconds"
            quiet, used = monotonic(), now
        sleep(0.05)


def _processor_seconds(started: list["subprocess.Popen[bytes]"]) -> float:
    """Sum the seconds that processes have computed, by the kernel; an ended one adds nothing."""
    ticks = 0
    for process in started:
        with suppress(OSError):
            stat = Path(f"/proc/{process.pid}/stat").read_text(errors="replace")
            ticks += sum(map(int, stat.rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else ""


def _collect(number: int, case: Case, folder: Path) -> Outcome | None:
    """Collect what all ranks found of a case; None where one has not come to its end."""
    paths = [folder / f"{number}.{rank}.json" for rank in range(case.processes)]
    if not all(path.exists() for path in paths):
        return None
    parts = [msgspec.json.decode(path.read_bytes(), type=Outcome) for path in paths]
    unique = {(each.check, each.what): each for part in parts for each in part.found}
    return Outcome(
        case=case,
        refused=parts[0].refused,
        checks=parts[0].checks,
        compared=sum({part.compared for part in parts}),
        apart=max(part.apart for part in parts),
        found=tuple(unique.values()),
    )
