"""Launches the processes of a proof on this machine and collects their results."""

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

STALL_S = 60.0
"""Seconds without a finished case after which idle processes are stopped."""
STALL_UTILIZATION = 0.02
"""CPU utilization of all processes, in cores, below which they count as idle (deadlocked)."""
CASE_CPU_S = 600.0
"""Total CPU seconds per case after which the processes are stopped."""


def run_cases(job: Job, folder: Path, done: Callable[[Outcome], None]) -> Iterator[Outcome]:
    """Run the cases of a job and yield the outcome of each.

    If the processes fail or hang, they are stopped, the current case gets a counterexample, and new
    processes run the remaining cases.

    Args:
        job: cases with the same number of processes.
        folder: folder with the job, the results and the reference.
        done: called with each outcome.
    """
    pending = dict(job.cases)
    while pending:
        failure = _run(
            msgspec.structs.replace(job, cases=pending), folder, next(iter(pending.values()))
        )
        for number, case in list(pending.items()):
            outcome = _collect(number, case, folder)
            if outcome is None:
                if failure is None:  # exit code 0 without a result
                    failure = "the processes ended early"
                counterexample = Counterexample(check="run", what=failure)
                outcome = Outcome(case=case, checks=("run",), found=(counterexample,))
                failure = None
                del pending[number]
                done(outcome)
                yield outcome
                break
            del pending[number]
            done(outcome)
            yield outcome


def _run(job: Job, folder: Path, case: Case) -> str | None:
    """Run the processes to their end; return why they were stopped, or None."""
    (folder / "job.json").write_bytes(msgspec.json.encode(job))
    # Hosted here, so the store outlives any rank, and the port is known before they start.
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    with ExitStack() as stack:
        logs = [folder / f"log.{rank}" for rank in range(case.processes)]
        processes = []
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
            processes.append(process)
        return _wait(processes, logs, job, folder)


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    paths = os.pathsep.join(part for part in (str(Path.cwd()), *sys.path) if part)
    return {**os.environ, "PYTHONPATH": paths, **variables}


def _stop(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    process.wait()


def _wait(
    processes: list["subprocess.Popen[bytes]"], logs: list[Path], job: Job, folder: Path
) -> str | None:
    finished, last_progress = -1, monotonic()
    cpu_at_case = cpu_at_check = 0.0  # CPU seconds when the case and the stall timer started
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                sleep(0.5)  # let other ranks write their errors
                return f"rank {rank} failed: {_last_line(logs[rank]) or f'exit code {code}'}"
        if all(code == 0 for code in codes):
            return None
        count = sum(1 for number in job.cases if (folder / f"{number}.0.json").exists())
        if count != finished:
            finished, last_progress = count, monotonic()
            cpu_at_case = cpu_at_check = _processor_seconds(processes)
        if monotonic() - last_progress > STALL_S:
            cpu_seconds = _processor_seconds(processes)
            # The difference is negative if a process has just ended.
            if 0 <= cpu_seconds - cpu_at_check < STALL_UTILIZATION * STALL_S:
                return f"no case finished in {STALL_S:.0f} s and all ranks are idle: a deadlock"
            if cpu_seconds - cpu_at_case > CASE_CPU_S:
                return f"no case finished in {CASE_CPU_S:.0f} CPU seconds"
            last_progress, cpu_at_check = monotonic(), cpu_seconds
        sleep(0.05)


def _processor_seconds(processes: list["subprocess.Popen[bytes]"]) -> float:
    """Total CPU seconds of the running processes, from /proc; ended processes count 0."""
    ticks = 0
    for process in processes:
        with suppress(OSError):
            stat = Path(f"/proc/{process.pid}/stat").read_text(errors="replace")
            # utime and stime, counted after the command name, which may contain spaces.
            ticks += sum(map(int, stat.rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else ""


def _collect(number: int, case: Case, folder: Path) -> Outcome | None:
    """Combine the results of all ranks for a case; None if a rank has not finished it."""
    paths = [folder / f"{number}.{rank}.json" for rank in range(case.processes)]
    if not all(path.exists() for path in paths):
        return None
    rank_outcomes = [msgspec.json.decode(path.read_bytes(), type=Outcome) for path in paths]
    unique = {
        (counterexample.check, counterexample.what): counterexample
        for outcome in rank_outcomes
        for counterexample in outcome.found
    }
    return Outcome(
        case=case,
        refused=rank_outcomes[0].refused,
        checks=rank_outcomes[0].checks,
        compared=sum(outcome.compared for outcome in rank_outcomes),
        apart=max(outcome.apart for outcome in rank_outcomes),
        found=tuple(unique.values()),
    )
