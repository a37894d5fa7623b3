"""How often `compare` calls equal runs a regression, and which slow-downs it finds: real runs.

One small training runs again and again under `ms-profile run`, unchanged or with more to compute;
the kinds alternate. Every two unchanged runs are an A/A pair; every unchanged and every slower one
a pair in which the regression should be found. Shorter runs are the first steps of longer ones.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import permutations, product
from pathlib import Path

import numpy as np

from ms_profile.comparison import CHANCE, LEAST_CHANGE, compare_steps, recorded_steps

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
LENGTHS = (8, 16, 40, 100)


def recorded(folder: Path, script: Path, work: int) -> np.ndarray:
    window = ["--skip", "2", "--active", "4", "--windows", "1", "--warmup", "1"]
    command = [sys.executable, "-m", "ms_profile", "run", "--train-script", str(script)]
    command += ["--output-dir", str(folder), *window, "--", str(work), str(max(LENGTHS) + 8)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    found = recorded_steps(folder)
    assert found is not None
    return found


def called(old: np.ndarray, new: np.ndarray) -> bool:
    change = float(np.median(new) / np.median(old)) - 1
    return compare_steps(old, new) < CHANCE and change >= LEAST_CHANGE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=30, help="unchanged; half as many of the rest")
    options = parser.parse_args()
    runs: dict[int, list[np.ndarray]] = {WORK: [], WORK + 1: [], WORK + 2: [], WORK + 4: []}
    with tempfile.TemporaryDirectory() as name:
        script = Path(name) / "train.py"
        script.write_text(SCRIPT)
        for number in range(options.runs):
            for work, own in runs.items():
                if work == WORK or number % 2:
                    own.append(recorded(Path(name) / f"{work}-{number}", script, work))
    facts: dict[str, object] = {
        "step_ms": round(float(np.median(np.concatenate(runs[WORK]))) / 1e6, 2)
    }
    for length in LENGTHS:
        short = {work: [one[:length] for one in own] for work, own in runs.items()}
        equal = [called(a, b) for a, b in permutations(short[WORK], 2)]
        row = {"equal runs called a regression": f"{sum(equal)} of {len(equal)}"}
        for work in (WORK + 1, WORK + 2, WORK + 4):
            found = [called(a, b) for a, b in product(short[WORK], short[work])]
            slower = np.median([np.median(one) for one in short[work]])
            usual = np.median([np.median(one) for one in short[WORK]])
            row[f"{slower / usual - 1:+.1%} found"] = f"{sum(found)} of {len(found)}"
        facts[f"{length} steps"] = row
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
