"""Run a plan: in this process, or in several of this host that torchrun starts."""

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
"""Set in the processes that `launch` starts: it prints what was recorded, they don't."""


@frozen(kw_only=True)
class RunOutcome:
    """How a run ended, and what it recorded."""

    exit_code: int
    """The script's own."""
    ranks: tuple[RankManifest, ...]
    """What each rank recorded; those that could not report are missing."""
    complete: bool
    """Whether everything that was to be recorded was."""
    exit_codes: Mapping[int, int] = field(factory=dict)
    """What the launcher saw of ranks that failed; minus the number of a signal that ended one."""


def run_here(plan: Plan, *, overwrite: bool = False) -> RunOutcome:
    """Run the plan's script in this process, which may be one of several under a launcher.

    Raises:
        CaptureError: no such script, torch is missing, or the output folder holds another run.
    """
    _check(plan)
    here = ProcessRank.from_environment()
    if overwrite:
        clear_run(plan.output_dir, here)
    session = Session(plan, here)
    own_process = os.getpid()
    terminated = 128 + signal.SIGTERM, "terminated by SIGTERM"
    termination = Termination(lambda: session.finish(*terminated))
    try:
        ending = run_script(plan.script, plan.arguments)
    except CaptureError as error:
        session.finish(2, str(error))
        raise
    if os.getpid() != own_process:  # forked by the script, and through with it
        sys.exit(ending.exit_code)
    with termination.saving():
        session.finish(ending.exit_code, ending.error)
    return RunOutcome(
        exit_code=ending.exit_code, ranks=(session.manifest,), complete=session.complete
    )


def launch(
    plan: Plan, *, processes: int, options: Sequence[str], overwrite: bool = False
) -> RunOutcome:
    """Run the plan's script in `processes` processes of this host, started by torchrun.

    Args:
        plan: what to capture; each process captures itself.
        processes: how many.
        options: of `ms-profile run` that make the same plan in each process.
        overwrite: replace the run that the output folder holds.

    Raises:
        CaptureError: as `run_here`.
    """
    if processes < 1:
        raise CaptureError(f"--nproc-per-node is {processes}; at least one process is needed")
    _check(plan)
    everyone = ProcessRank(rank=0, world_size=0)
    if overwrite:
        clear_run(plan.output_dir, everyone)
    if rank_path(plan.output_dir, 0).exists():
        raise CaptureError(
            f"{plan.output_dir} already holds a run; choose another --output-dir, "
            "or pass --overwrite"
        )
    with TemporaryDirectory(prefix="ms-profile-") as room:
        endings = Path(room) / "exit-codes.json"
        code = _torchrun(processes, options, endings)
        exit_codes = _read_exit_codes(endings)
    ranks = tuple(read_ranks(plan.output_dir))
    return RunOutcome(
        exit_code=_first_failure(ranks, exit_codes) or code if code else 0,
        ranks=ranks,
        complete=len(ranks) == processes and all(_complete(rank) for rank in ranks),
        exit_codes=exit_codes,
    )


def _torchrun(processes: int, options: Sequence[str], endings: Path) -> int:
    """Start the processes, wait for them, and return torchrun's exit code."""
    launcher = [sys.executable, "-m", "ms_profile.recording.torchrun", str(endings), "--standalone"]
    workers = ["--nproc-per-node", str(processes), "-m", "ms_profile", "run", *options]
    child = subprocess.Popen([*launcher, *workers], env=os.environ | {LAUNCHED: "1"})
    before = signal.getsignal(signal.SIGTERM)

    def forward(number: int, _: FrameType | None) -> None:
        child.send_signal(number)

    signal.signal(signal.SIGTERM, forward)
    try:
        return child.wait()
    except KeyboardInterrupt:  # the terminal has sent it to the child too
        child.wait()
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, before)


def _read_exit_codes(path: Path) -> dict[int, int]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[int, int])
    except FileNotFoundError:  # all ended well, or torchrun was killed
        return {}


def _check(plan: Plan) -> None:
    if not plan.script.is_file():
        raise CaptureError(f"there is no script {plan.script}; give the path of a Python file")
    if importlib.util.find_spec("torch") is None:
        raise CaptureError("torch is not installed; pip install 'ms-profile[torch]'")


def _first_failure(ranks: Sequence[RankManifest], exit_codes: Mapping[int, int]) -> int:
    """Return the exit code of the rank that failed first by itself; 0 where none is known."""
    failed = [
        (rank.end.wall_ns, rank.exit_code)
        for rank in ranks
        if rank.end is not None and rank.exit_code and rank.exit_code < 128
    ]
    if failed:
        return min(failed)[1]
    unsaid = [code for _, code in sorted(exit_codes.items()) if 0 < code < 128]
    return unsaid[0] if unsaid else 0


def _complete(rank: RankManifest) -> bool:
    return rank.status != "running" and rank.complete
