"""Faults injected into real processes: the ledger names the rank and phase behind the waits."""

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
SKIP, ACTIVE, WINDOW_INTERVAL = 3, 6, 9
PHASES = ("data", "compute", "garbage", "host")


def run_cases(folder: Path, cases: list[str], ranks: int) -> list[tuple[str, str, float]]:
    """Run the cases, one per window; return (injected, blamed, confidence) of each."""
    window = [
        "--skip",
        str(SKIP),
        "--active",
        str(ACTIVE),
        "--every",
        str(WINDOW_INTERVAL),
        "--windows",
        "0",
    ]
    command = [sys.executable, "-m", "ms_profile", "run", "--nproc-per-node", str(ranks), *window]
    command += ["--train-script", str(SCRIPT), "--output-dir", str(folder), "--"]
    command += [str(SKIP), str(ACTIVE + 1), str(WINDOW_INTERVAL), *cases]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
    assert process.returncode == 0, process.stderr
    pauses = {rank: read_pauses(folder, rank) for rank in range(ranks)}
    garbage = {
        rank: pauses_of_rank.garbage
        for rank, pauses_of_rank in pauses.items()
        if pauses_of_rank is not None
    }
    data = {
        rank: pauses_of_rank.data
        for rank, pauses_of_rank in pauses.items()
        if pauses_of_rank is not None
    }
    results = []
    for number, case in enumerate(cases):
        name = f"traces/rank-{{:05d}}.{number:03d}.json"
        traces = {rank: read_trace(folder / name.format(rank)) for rank in range(ranks)}
        suspect = find_suspect(analyse_traces(traces, garbage=garbage, data=data).ledger)
        assert suspect is not None
        blamed = f"{suspect.rank}:{suspect.phase}"
        results.append((case.rsplit(":", 1)[0], blamed, suspect.confidence))
    return results


def test_each_kind_of_fault_is_charged_to_its_rank_and_phase(tmp_path: Path) -> None:
    """On two ranks in turn: data, compute, garbage collection and host, 60 ms per step."""
    cases = [f"{index % 2}:{phase}:60" for index, phase in enumerate(PHASES)]
    results = run_cases(tmp_path / "out", cases, ranks=2)
    assert [blamed for _, blamed, _ in results] == [injected for injected, _, _ in results]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_faults_of_all_sizes_are_charged_correctly_in_95_percent(
    tmp_path: Path, ranks: int
) -> None:
    """5 ms to 1 s on any rank: at most one case in twenty has the wrong rank or phase."""
    cases = [
        f"{(index + number) % ranks}:{phase}:{delay_ms}"
        for number, delay_ms in enumerate((5, 10, 20, 50, 100, 300, 1000))
        for index, phase in enumerate(PHASES)
    ]
    results = run_cases(tmp_path / "out", cases, ranks)
    wrong = [case for case in results if case[0] != case[1]]
    assert len(wrong) <= len(cases) * 0.05, wrong
