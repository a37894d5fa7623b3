"""How often `compare` calls equal runs a regression, and which slow-downs it finds: real runs.

One small training runs again and again under `ms-profile run`, unchanged or with more to compute;
the kinds alternate. Every two unchanged runs are an A/A pair; every unchanged and every slower one
a pair in which the regression should be found. Shorter runs are the first steps of longer ones.
Of six runs in a row the odd ones are also held against the even ones, three to three.
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


def recorded(folder: Path, script: Path, work: int) -> RecordedSteps:
    window = ["--skip", "2", "--active", "4", "--windows", "1", "--warmup", "1"]
    command = [sys.executable, "-m", "ms_profile", "run", "--train-script", str(script)]
    command += ["--output-dir", str(folder), *window, "--", str(work), str(max(LENGTHS) + 8)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    found = recorded_steps(folder)
    assert found is not None
    return found


def first(steps: RecordedSteps, length: int) -> tuple[np.ndarray, np.ndarray]:
    assert steps.without_cpu_wait_ns is not None
    return steps.wall_ns[:length], steps.without_cpu_wait_ns[:length]


def slower(old: np.ndarray, new: np.ndarray) -> bool:
    change = float(np.median(new) / np.median(old)) - 1
    return compare_runs([old], [new]) < SIGNIFICANCE and change >= LEAST_CHANGE


def called(old: tuple[np.ndarray, np.ndarray], new: tuple[np.ndarray, np.ndarray]) -> bool:
    """As `compare` calls a regression: in wall time, and without the waits for a CPU."""
    return all(slower(a, b) for a, b in zip(old, new, strict=True))


def in_turns(old: list[Series], new: list[Series], each: int = 3) -> list[tuple[Runs, Runs]]:
    """Pair neighboring runs, `each` of one kind against as many of the other."""
    last = min(len(old), len(new)) - each + 1
    return [(old[at : at + each], new[at : at + each]) for at in range(last)]


def called_of_several(old: Runs, new: Runs) -> bool:
    """As `compare` calls a regression from several runs."""
    for series in range(2):
        a, b = [one[series] for one in old], [one[series] for one in new]
        change = np.exp(np.mean([np.log(np.median(one)) for one in b]))
        change /= np.exp(np.mean([np.log(np.median(one)) for one in a]))
        if not (compare_runs(a, b) < SIGNIFICANCE and change - 1 >= LEAST_CHANGE):
            return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=30, help="unchanged; half as many of the rest")
    options = parser.parse_args()
    runs: dict[int, list[RecordedSteps]] = {WORK: [], WORK + 2: [], WORK + 4: []}
    with tempfile.TemporaryDirectory() as name:
        script = Path(name) / "train.py"
        script.write_text(SCRIPT)
        for number in range(options.runs):
            for work, own in runs.items():
                if work == WORK or number % 2:
                    own.append(recorded(Path(name) / f"{work}-{number}", script, work))
    everything = np.concatenate([one.wall_ns for one in runs[WORK]])
    facts: dict[str, object] = {
        "step_ms": round(float(np.median(everything)) / 1e6, 2),
        "waited_for_a_cpu": [round(one.cpu_wait_share or 0.0, 3) for one in runs[WORK]],
    }
    for length in LENGTHS:
        short = {work: [first(one, length) for one in own] for work, own in runs.items()}
        equal = list(permutations(short[WORK], 2))
        by_wall = sum(slower(a[0], b[0]) for a, b in equal)
        row = {
            "equal runs called a regression": f"{sum(starmap(called, equal))} of {len(equal)}",
            "equal runs, wall time alone": f"{by_wall} of {len(equal)}",
        }
        odd, even = short[WORK][::2], short[WORK][1::2]
        turns = [*in_turns(odd, even), *in_turns(even, odd)]
        several = sum(starmap(called_of_several, turns))
        row["equal runs, three to three"] = f"{several} of {len(turns)}"
        for work in (WORK + 2, WORK + 4):
            found = [called(a, b) for a, b in product(short[WORK], short[work])]
            row[f"{work / WORK - 1:+.0%} work found"] = f"{sum(found)} of {len(found)}"
            turns = in_turns(odd, short[work])
            several = sum(starmap(called_of_several, turns))
            row[f"{work / WORK - 1:+.0%} work found, three to three"] = f"{several} of {len(turns)}"
        facts[f"{length} steps"] = row
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
