"""Run a plan: in this process, or in several of this host that torchrun starts."""

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Final

from attrs import frozen

from ms_profile.capture.plan import Place, Plan, clear_run
from ms_profile.capture.script import Termination, run_script
from ms_profile.capture.session import Session
from ms_profile.errors import CaptureError
from ms_profile.format import RankManifest, rank_path, read_ranks

__all__ = ["LAUNCHED", "Outcome", "launch", "run_here"]

LAUNCHED: Final = "MS_PROFILE_LAUNCHED"
"""Set in the processes that `launch` starts: what was recorded is told by it, not by each."""


@frozen(kw_only=True)
class Outcome:
    """How a run ended, and what was recorded."""

    exit_code: int
    """The script's own."""
    ranks: tuple[RankManifest, ...]
    """What each rank recorded; those that could not report are missing."""
    complete: bool
    """Whether everything that was to be recorded was."""


def run_here(plan: Plan, *, overwrite: bool = False) -> Outcome:
    """Run the plan's script in this process, which may be one of several under a launcher.

    Raises:
        CaptureError: no such script, torch is missing, or the output folder holds another run.
    """
    _check(plan)
    place = Place.here()
    if overwrite:
        clear_run(plan.output_dir, place)
    session = Session(plan, place)
    terminated = 128 + signal.SIGTERM, "terminated by SIGTERM"
    termination = Termination(lambda: session.finish(*terminated))
    try:
        ending = run_script(plan.script, plan.arguments)
    except CaptureError as error:
        session.finish(2, str(error))
        raise
    with termination.saving():
        session.finish(ending.exit_code, ending.error)
    return Outcome(exit_code=ending.exit_code, ranks=(session.manifest,), complete=session.complete)


def launch(
    plan: Plan, *, processes: int, options: Sequence[str], overwrite: bool = False
) -> Outcome:
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
    everyone = Place(rank=0, world_size=0)
    if overwrite:
        clear_run(plan.output_dir, everyone)
    if rank_path(plan.output_dir, 0).exists():
        raise CaptureError(
            f"{plan.output_dir} already holds a run; choose another --output-dir, "
            "or pass --overwrite"
        )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    workers = ["--nproc-per-node", str(processes), "-m", "ms_profile", "run", *options]
    child = subprocess.Popen([*launcher, *workers], env=os.environ | {LAUNCHED: "1"})
    before = signal.getsignal(signal.SIGTERM)

    def forward(number: int, _: FrameType | None) -> None:
        child.send_signal(number)

    signal.signal(signal.SIGTERM, forward)
    try:
        code = child.wait()
    except KeyboardInterrupt:  # the terminal has sent it to the child too
        child.wait()
        code = 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, before)
    ranks = tuple(read_ranks(plan.output_dir))
    return Outcome(
        exit_code=_first_failure(ranks) or code if code else 0,
        ranks=ranks,
        complete=len(ranks) == processes and all(_complete(rank) for rank in ranks),
    )


def _check(plan: Plan) -> None:
    if not plan.script.is_file():
        raise CaptureError(f"there is no script {plan.script}; give the path of a Python file")
    if importlib.util.find_spec("torch") is None:
        raise CaptureError("torch is not installed; pip install 'ms-profile[torch]'")


def _first_failure(ranks: Sequence[RankManifest]) -> int:
    """The exit code of the rank that failed first by itself, 0 if none reported a failure."""
    failed = [
        (rank.end.wall_ns, rank.exit_code)
        for rank in ranks
        if rank.end is not None and rank.exit_code and rank.exit_code < 128
    ]
    return min(failed)[1] if failed else 0


def _complete(rank: RankManifest) -> bool:
    return rank.status != "running" and rank.complete
