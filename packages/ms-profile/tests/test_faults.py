"""Injected faults on real processes: the ledger names the rank and phase that caused the waits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ms_profile.analysis.host_pauses import read_pauses
from ms_profile.analysis.ledger import find_suspect
from ms_profile.analysis.whole_run import analyse_traces
from ms_profile.trace.reader import read_trace

pytest.importorskip("torch")
SCRIPT = Path(__file__).with_name("faulty_script.py")
SKIP, ACTIVE, EVERY = 3, 6, 9
PHASES = ("data", "compute", "garbage", "host")


def blamed(folder: Path, cases: list[str], ranks: int) -> list[tuple[str, str, float]]:
    """Run the cases, one a window, and give (injected, named, confidence) of each."""
    window = ["--skip", str(SKIP), "--active", str(ACTIVE), "--every", str(EVERY), "--windows", "0"]
    command = [sys.executable, "-m", "ms_profile", "run", "--nproc-per-node", str(ranks), *window]
    command += ["--train-script", str(SCRIPT), "--output-dir", str(folder), "--"]
    command += [str(SKIP), str(ACTIVE + 1), str(EVERY), *cases]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 0, done.stderr
    pauses = {rank: read_pauses(folder, rank) for rank in range(ranks)}
    garbage = {rank: found.garbage for rank, found in pauses.items() if found is not None}
    data = {rank: found.data for rank, found in pauses.items() if found is not None}
    found = []
    for number, case in enumerate(cases):
        name = f"traces/rank-{{:05d}}.{number:03d}.json"
        traces = {rank: read_trace(folder / name.format(rank)) for rank in range(ranks)}
        suspect = find_suspect(analyse_traces(traces, garbage=garbage, data=data).ledger)
        assert suspect is not None
        named = f"{suspect.rank}:{suspect.phase}"
        found.append((case.rsplit(":", 1)[0], named, suspect.confidence))
    return found


def test_each_kind_of_fault_is_charged_to_its_rank_and_phase(tmp_path: Path) -> None:
    """Two ranks; data, compute, garbage collection and host, 60 ms a step, on either."""
    cases = [f"{rank}:{phase}:60" for rank in (0, 1) for phase in PHASES]
    found = blamed(tmp_path / "out", cases, ranks=2)
    assert [named for _, named, _ in found] == [injected for injected, _, _ in found]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_small_and_large_faults_are_charged_rightly_in_95_percent(
    tmp_path: Path, ranks: int
) -> None:
    """5 ms to 1 s on any rank: at most one case in twenty is charged to another rank or phase."""
    cases = [
        f"{(place + number) % ranks}:{phase}:{delay_ms}"
        for number, delay_ms in enumerate((5, 10, 20, 50, 100, 300, 1000))
        for place, phase in enumerate(PHASES)
    ]
    found = blamed(tmp_path / "out", cases, ranks)
    wrong = [case for case in found if case[0] != case[1]]
    assert len(wrong) <= len(cases) * 0.05, wrong
