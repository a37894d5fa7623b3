"""False alarms and detected slowdowns of `compare`, on real runs.

A small training runs repeatedly under `ms-profile run`, unchanged or with more computation, in
alternation. Every two unchanged runs are an A/A pair; every unchanged and every slower run are a
pair in which a regression should be detected. Shorter runs are the first steps of longer ones. Of
six consecutive runs the odd ones are also compared with the even ones, three against three.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import permutations, product, starmap
from pathlib import Path

import numpy as np

from ms_profile.analysis.comparison import (
    LEAST_CHANGE,
    SIGNIFICANCE,
    RecordedSteps,
    compare_runs,
    recorded_steps,
)

SCRIPT = """
import sys
import torch
work = int(sys.argv[1])
torch.manual_seed(0)
layer = torch.nn.Linear(384, 384)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
batch = torch.ones(192, 384)
for _ in range(int(sys.argv[2])):
    x = batch
    for _ in range(work):
        x = layer(x)
    x.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
WORK = 20
Series = tuple[np.ndarray, np.ndarray]
Runs = list[Series]
LENGTHS = (8, 16, 40, 100)


def record_run(folder: Path, script: Path, work: int) -> RecordedSteps:
    window = ["--skip", "2", "--active", "4", "--windows", "1", "--warmup", "1"]
    command = [sys.executable, "-m", "ms_profile", "run", "--train-script", str(script)]
    command += ["--output-dir", str(folder), *window, "--", str(work), str(max(LENGTHS) + 8)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    steps = recorded_steps(folder)
    assert steps is not None
    return steps


def first(steps: RecordedSteps, length: int) -> tuple[np.ndarray, np.ndarray]:
    assert steps.without_cpu_wait_ns is not None
    return steps.wall_ns[:length], steps.without_cpu_wait_ns[:length]


def slower(old: np.ndarray, new: np.ndarray) -> bool:
    change = float(np.median(new) / np.median(old)) - 1
    return compare_runs([old], [new]) < SIGNIFICANCE and change >= LEAST_CHANGE


def is_regression(old: tuple[np.ndarray, np.ndarray], new: tuple[np.ndarray, np.ndarray]) -> bool:
    """Return whether `compare` reports a regression: in wall time, and without waits for a CPU."""
    return all(slower(a, b) for a, b in zip(old, new, strict=True))


def neighboring_groups(
    old: list[Series], new: list[Series], group_size: int = 3
) -> list[tuple[Runs, Runs]]:
    """Pair neighboring runs, `group_size` of one kind against the same number of the other."""
    count = min(len(old), len(new)) - group_size + 1
    return [
        (old[index : index + group_size], new[index : index + group_size]) for index in range(count)
    ]


def is_regression_of_groups(old: Runs, new: Runs) -> bool:
    """Return whether `compare` reports a regression between two groups of runs."""
    for series in range(2):
        a, b = [run[series] for run in old], [run[series] for run in new]
        change = np.exp(np.mean([np.log(np.median(times)) for times in b]))
        change /= np.exp(np.mean([np.log(np.median(times)) for times in a]))
        if not (compare_runs(a, b) < SIGNIFICANCE and change - 1 >= LEAST_CHANGE):
            return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--runs", type=int, default=30, help="unchanged runs; half of it for others"
    )
    options = parser.parse_args()
    runs: dict[int, list[RecordedSteps]] = {WORK: [], WORK + 2: [], WORK + 4: []}
    with tempfile.TemporaryDirectory() as name:
        script = Path(name) / "train.py"
        script.write_text(SCRIPT)
        for number in range(options.runs):
            for work, runs_of_work in runs.items():
                if work == WORK or number % 2:
                    runs_of_work.append(record_run(Path(name) / f"{work}-{number}", script, work))
    step_ns = np.concatenate([run.wall_ns for run in runs[WORK]])
    facts: dict[str, object] = {
        "step_ms": round(float(np.median(step_ns)) / 1e6, 2),
        "waited_for_a_cpu": [round(run.cpu_wait_share or 0.0, 3) for run in runs[WORK]],
    }
    for length in LENGTHS:
        short = {
            work: [first(run, length) for run in runs_of_work]
            for work, runs_of_work in runs.items()
        }
        aa_pairs = list(permutations(short[WORK], 2))
        by_wall = sum(slower(a[0], b[0]) for a, b in aa_pairs)
        row = {
            "equal runs reported as regressions": (
                f"{sum(starmap(is_regression, aa_pairs))} of {len(aa_pairs)}"
            ),
            "equal runs, wall time only": f"{by_wall} of {len(aa_pairs)}",
        }
        odd, even = short[WORK][::2], short[WORK][1::2]
        group_pairs = [*neighboring_groups(odd, even), *neighboring_groups(even, odd)]
        regressions = sum(starmap(is_regression_of_groups, group_pairs))
        row["equal runs, three to three"] = f"{regressions} of {len(group_pairs)}"
        for work in (WORK + 2, WORK + 4):
            detected = [is_regression(a, b) for a, b in product(short[WORK], short[work])]
            row[f"{work / WORK - 1:+.0%} work detected"] = f"{sum(detected)} of {len(detected)}"
            group_pairs = neighboring_groups(odd, short[work])
            regressions = sum(starmap(is_regression_of_groups, group_pairs))
            row[f"{work / WORK - 1:+.0%} work detected, three to three"] = (
                f"{regressions} of {len(group_pairs)}"
            )
        facts[f"{length} steps"] = row
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
