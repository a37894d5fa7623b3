"""Run a plan in this process, or in several local processes started by torchrun."""

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Final

import msgspec
from attrs import field, frozen

from ms_profile.errors import CaptureError
from ms_profile.log.manifest import RankManifest, rank_path, read_ranks
from ms_profile.recording.plan import Plan, ProcessRank, clear_run
from ms_profile.recording.script import Termination, run_script
from ms_profile.recording.session import Session

LAUNCHED: Final = "MS_PROFILE_LAUNCHED"
"""Set in the processes that `launch` starts: the launcher prints the outcome, they do not."""


@frozen(kw_only=True)
class RunOutcome:
    """Exit codes of a run, and the manifests it recorded."""

    exit_code: int
    """The script's exit code."""
    ranks: tuple[RankManifest, ...]
    """Manifests of the recorded ranks; a rank that could not write one is missing."""
    complete: bool
    """Whether the recording has no gaps."""
    exit_codes: Mapping[int, int] = field(factory=dict)
    """Exit codes of failed ranks as seen by torchrun; negative signal number if killed."""


def run_here(plan: Plan, *, overwrite: bool = False) -> RunOutcome:
    """Run the plan's script in this process, which may be one rank under a launcher.

    Raises:
        CaptureError: no such script, torch is missing, or the output folder has another run.
    """
    _check(plan)
    process = ProcessRank.from_environment()
    if overwrite:
        clear_run(plan.output_dir, process)
    session = Session(plan, process)
    pid = os.getpid()
    on_sigterm = 128 + signal.SIGTERM, "terminated by SIGTERM"
    termination = Termination(lambda: session.finish(*on_sigterm))
    try:
        result = run_script(plan.script, plan.arguments)
    except CaptureError as error:
        session.finish(2, str(error))
        raise
    if os.getpid() != pid:  # a child that the script forked, which has returned from the script
        sys.exit(result.exit_code)
    with termination.saving():
        session.finish(result.exit_code, result.error)
    return RunOutcome(
        exit_code=result.exit_code, ranks=(session.manifest,), complete=session.complete
    )


def launch(
    plan: Plan, *, processes: int, options: Sequence[str], overwrite: bool = False
) -> RunOutcome:
    """Run the plan's script in `processes` local processes, started by torchrun.

    Args:
        plan: recording plan; each process records itself.
        processes: number of processes.
        options: `ms-profile run` options that recreate the plan in each process.
        overwrite: replace an earlier run in the output folder.

    Raises:
        CaptureError: no such script, torch is missing, or the output folder has another run.
    """
    if processes < 1:
        raise CaptureError(
            f"--nproc-per-node must be at least 1, got {processes}; set one per device"
        )
    _check(plan)
    # world_size=0 makes clear_run remove the files of every rank.
    all_ranks = ProcessRank(rank=0, world_size=0)
    if overwrite:
        clear_run(plan.output_dir, all_ranks)
    if rank_path(plan.output_dir, 0).exists():
        raise CaptureError(
            f"{plan.output_dir} already has a run; choose another --output-dir, or pass --overwrite"
        )
    with TemporaryDirectory(prefix="ms-profile-") as temp_dir:
        exit_codes_path = Path(temp_dir) / "exit-codes.json"
        code = _torchrun(processes, options, exit_codes_path)
        exit_codes = _read_exit_codes(exit_codes_path)
    ranks = tuple(read_ranks(plan.output_dir))
    return RunOutcome(
        # torchrun exits with 1 for any failure; the script's own code is more specific.
        exit_code=_first_failure(ranks, exit_codes) or code if code else 0,
        ranks=ranks,
        complete=len(ranks) == processes and all(_complete(rank) for rank in ranks),
        exit_codes=exit_codes,
    )


def _torchrun(processes: int, options: Sequence[str], exit_codes_path: Path) -> int:
    """Run torchrun to completion and return its exit code."""
    launcher = [
        sys.executable,
        "-m",
        "ms_profile.recording.torchrun",
        str(exit_codes_path),
        "--standalone",
    ]
    workers = ["--nproc-per-node", str(processes), "-m", "ms_profile", "run", *options]
    child = subprocess.Popen([*launcher, *workers], env=os.environ | {LAUNCHED: "1"})
    previous_handler = signal.getsignal(signal.SIGTERM)

    # A cluster's scheduler signals this process only; torchrun passes the signal on to the ranks,
    # which save their recordings.
    def forward(number: int, _: FrameType | None) -> None:
        child.send_signal(number)

    signal.signal(signal.SIGTERM, forward)
    try:
        return child.wait()
    except KeyboardInterrupt:  # the terminal sends SIGINT to the child as well
        child.wait()
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def _read_exit_codes(path: Path) -> dict[int, int]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[int, int])
    except FileNotFoundError:  # every process succeeded, or torchrun was killed
        return {}


def _check(plan: Plan) -> None:
    if not plan.script.is_file():
        raise CaptureError(f"script {plan.script} does not exist; pass the path of a Python file")
    if importlib.util.find_spec("torch") is None:
        raise CaptureError("torch is not installed; pip install 'ms-profile[torch]'")


def _first_failure(ranks: Sequence[RankManifest], exit_codes: Mapping[int, int]) -> int:
    """Return the exit code of the first rank that failed on its own, or 0 if unknown.

    Codes of 128 and above come from signals, such as the launcher stopping the other ranks.
    """
    failed = [
        (rank.end.wall_ns, rank.exit_code)
        for rank in ranks
        if rank.end is not None and rank.exit_code and rank.exit_code < 128
    ]
    if failed:
        return min(failed)[1]
    # Ranks that wrote no final manifest: torchrun's codes, by rank.
    unreported = [code for _, code in sorted(exit_codes.items()) if 0 < code < 128]
    return unreported[0] if unreported else 0


def _complete(rank: RankManifest) -> bool:
    return rank.status != "running" and rank.complete
