"""Does PPO learn? Two-digit addition, 20% of the sums held out, exact-match reward.

For every seed: imitate right answers for a while, then run PPO on the exact-match reward, and as a
control on the same rewards assigned to other samples. Reports sampled accuracy on held-out sums
before and after.

    python packages/ms-align/benchmarks/learning.py --seeds 3
"""

import argparse
import json
import math
import tempfile
from pathlib import Path
from statistics import mean, stdev
from time import process_time
from typing import Any

import torch
from addition import END, Characters, Shuffled, exact, imitate, model, problems

from ms_align import PPOTrainer, Reward
from ms_align.models.language_model import copy_of

STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Two-sided 95% quantiles of Student's t, by number of seeds."""


class HeldOutAccuracy:
    """Reward that scores held-out sums with `exact`, whatever the policy trains on."""

    __name__ = "accuracy"

    def __init__(self, reward: Reward, held_out: set[str]) -> None:
        self.reward, self.held_out = reward, held_out

    def __call__(self, samples: Any) -> Any:
        """Return training rewards, or exact-match accuracy during evaluation."""
        is_held_out = samples[0].prompt in self.held_out
        return exact(samples) if is_held_out else self.reward(samples)


def main() -> None:
    """Print one line per seed, then the means with confidence intervals."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--imitate", type=int, default=300, help="updates before PPO")
    parser.add_argument("--steps", type=int, default=150, help="updates of PPO")
    parser.add_argument("--learning-rate", type=float, default=1.5e-4)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [run_seed(seed, options) for seed in range(options.seeds)]
    gains = [row["ppo"] - row["start"] for row in rows]
    control = [row["shuffled"] - row["start"] for row in rows]
    summary = {"rows": rows, "gain": interval(gains), "control": interval(control)}
    if options.json:
        print(json.dumps(summary, indent=2))
    else:
        for name in ("gain", "control"):
            low, middle, high = summary[name]
            print(f"{name}: {middle:+.1f} points, 95% interval {low:+.1f} to {high:+.1f}")


def run_seed(seed: int, options: argparse.Namespace) -> dict[str, float]:
    """Return accuracies in percent and CPU seconds of one seed."""
    training_rows, held_out = problems(seed)
    start_s = process_time()
    start = model(seed)
    imitate(start, training_rows, steps=options.imitate, seed=seed)
    row: dict[str, float] = {"seed": seed, "imitation_s": process_time() - start_s}
    rewards: tuple[tuple[str, Reward], ...] = (("ppo", exact), ("shuffled", Shuffled(seed)))
    for name, reward in rewards:
        start_s = process_time()
        with tempfile.TemporaryDirectory() as folder:
            ppo_trainer = trainer(copy_of(start), reward, held_out, seed, Path(folder), options)
            result = ppo_trainer.optimize(training_rows)
        row["start"] = 100 * result.first["reward"]
        row[name] = 100 * result.last["reward"]
        row[f"{name}_s"] = process_time() - start_s
    print(", ".join(f"{key} {value:.1f}" for key, value in row.items()), flush=True)
    return row


def trainer(
    policy: Any,
    reward: Reward,
    held_out: list[dict[str, str]],
    seed: int,
    folder: Path,
    options: argparse.Namespace,
) -> PPOTrainer:
    """Build the PPO trainer with the same settings for all seeds and rewards."""
    return PPOTrainer(
        policy_model=policy,
        reward_model=HeldOutAccuracy(reward, {row["prompt"] for row in held_out}),
        tokenizer=Characters(),
        held_out=held_out,
        kl_coeff=0.01,
        steps=options.steps,
        batch_size=256,
        minibatch_size=128,
        max_num_seqs=256,
        epochs=2,
        learning_rate=options.learning_rate,
        value_coeff=0.5,
        max_new_tokens=5,
        stop_token_ids=END,
        seed=seed,
        output_dir=folder,
        checkpoint_every=10**6,
        eval_every=100,
        eval_samples=0,
        log_every=100,
    )


def interval(values: list[float]) -> tuple[float, float, float]:
    """Return the mean and its 95% confidence interval: low, mean, high."""
    middle = mean(values)
    if len(values) < 2:
        return middle, middle, middle
    half = STUDENT.get(len(values), 2.0) * stdev(values) / math.sqrt(len(values))
    return middle - half, middle, middle + half


if __name__ == "__main__":
    main()
