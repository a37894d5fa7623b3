"""Is PPO's gain more than luck? Three seeds with the reward that is checked, three with a shuffled.

The shuffled reward gives the same numbers to the wrong samples, and the reward model has no say:
all else is equal. Each model is asked all held-out sums once, and its answers are drawn as PPO does
it, since it is their reward that PPO raises; they are compared with those of the tuned model,
question by question.

Run it in a road's folder that holds `sft` and `reward`: python .../examples/road/seeds.py .
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from ask import ANSWER, ROWS, open_transformers, read_lines, rendered
from transformers import AutoTokenizer

HERE = Path(__file__).resolve().parent
SEEDS = (0, 1, 2)
ARMS = {
    "checked": (),
    "shuffled": ("reward_model.right=rewards:shuffled", 'reward_model.judge=["reward/model", 0.0]'),
}
STUDENT = 4.303
"""Student's t of two degrees of freedom, of which 2.5% lie above."""


def train(road: Path, arm: str, seed: int, steps: int | None) -> Path:
    """Train one arm by one seed, or go on with it; its model's folder."""
    output = f"seeds/{arm}-{seed}"
    given = (*ARMS[arm], f"seed={seed}", f"output_dir={output}", "eval_every=1000")
    given += () if steps is None else (f"steps={steps}",)
    sets = [part for each in given for part in ("--set", each)]
    paths = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "ms_align", "ppo", str(HERE / "ppo.toml"), *sets]
    subprocess.run(command, cwd=road, env={**os.environ, "PYTHONPATH": paths}, check=True)
    return road / output / "model"


def right(model: Path, road: Path) -> list[bool]:
    """Which of the held-out sums a model answers rightly, once each."""
    rows = read_lines(road / "tasks" / "held_out.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [rendered(tokenizer, row["prompt"]) for row in rows]
    answers = open_transformers(model, seed=0)
    said = [
        text.strip()
        for at in range(0, len(prompts), ROWS)
        for text in answers(prompts[at : at + ROWS], ANSWER)
    ]
    return [text == row["answer"] for text, row in zip(said, rows, strict=True)]


def mcnemar(before: Sequence[bool], after: Sequence[bool]) -> float:
    """The probability that as uneven a share of the changed answers is luck, both sides.

    McNemar's exact test: of the answers that changed, half would be for the better by luck.
    """
    better = sum(b > a for a, b in zip(before, after, strict=True))
    worse = sum(a > b for a, b in zip(before, after, strict=True))
    changed, most = better + worse, max(better, worse)
    if not changed:
        return 1.0
    tail = sum(math.comb(changed, k) for k in range(most, changed + 1))
    return min(1.0, float(2 * tail / 2**changed))


def interval(gains: Sequence[float]) -> tuple[float, float]:
    """Where the mean gain of all seeds lies with 95% confidence, by Student's t."""
    half = STUDENT * statistics.stdev(gains) / math.sqrt(len(gains))
    return statistics.mean(gains) - half, statistics.mean(gains) + half


def main() -> int:
    """Train and ask; 0 if the gain of the checked reward alone is significant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("road", type=Path, help="the road's folder")
    parser.add_argument("--steps", type=int, help="updates; by default those of ppo.toml")
    given = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    before = right(given.road / "sft" / "model", given.road)
    print(f"tuned: {sum(before)} of {len(before)} right")
    found, rows = {}, []
    for arm in ARMS:
        gains = []
        for seed in SEEDS:
            after = right(train(given.road, arm, seed, given.steps), given.road)
            gains.append(100 * (sum(after) - sum(before)) / len(after))
            p_value = mcnemar(before, after)
            rows.append({"arm": arm, "seed": seed, "right": sum(after), "p": p_value})
            print(
                f"{arm} seed {seed}: {sum(after)} right, {gains[-1]:+.1f} points, p {p_value:.2g}"
            )
        found[arm] = interval(gains)
        low, high = found[arm]
        print(f"{arm}: {statistics.mean(gains):+.1f} points, 95% from {low:+.1f} to {high:+.1f}")
    (given.road / "facts" / "seeds.json").write_text(json.dumps(rows, indent=1))
    return 0 if found["checked"][0] > 0 >= found["shuffled"][0] else 1


if __name__ == "__main__":
    sys.exit(main())
