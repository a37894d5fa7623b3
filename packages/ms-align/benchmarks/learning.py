"""Does PPO learn? Two-digit addition, 20% of the sums held out, exact-match reward.

Per seed: imitate right answers for a while, then PPO on the exact-match reward, and beside it the
same with rewards dealt to other samples. Sampled accuracy on the held-out sums before and after.

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
"""Two-sided 95% points of Student's t, by number of seeds."""


class Judge:
    """Held-out sums are judged by `exact` whatever the policy learns from."""

    __name__ = "accuracy"

    def __init__(self, reward: Reward, held_out: set[str]) -> None:
        self.reward, self.held_out = reward, held_out

    def __call__(self, samples: Any) -> Any:
        """Rewards of learning, or of an evaluation."""
        is_held_out = samples[0].prompt in self.held_out
        return exact(samples) if is_held_out else self.reward(samples)


def main() -> None:
    """Print a line a seed, then the means with their intervals."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--imitate", type=int, default=300, help="updates before PPO")
    parser.add_argument("--steps", type=int, default=150, help="updates of PPO")
    parser.add_argument("--learning-rate", type=float, default=1.5e-4)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [one(seed, options) for seed in range(options.seeds)]
    gains = [row["ppo"] - row["start"] for row in rows]
    control = [row["shuffled"] - row["start"] for row in rows]
    facts = {"rows": rows, "gain": interval(gains), "control": interval(control)}
    if options.json:
        print(json.dumps(facts, indent=2))
    else:
        for name in ("gain", "control"):
            low, middle, high = facts[name]
            print(f"{name}: {middle:+.1f} points, 95% interval {low:+.1f} to {high:+.1f}")


def one(seed: int, options: argparse.Namespace) -> dict[str, float]:
    """Accuracies in percent, and processor seconds, of one seed."""
    learned, held_out = problems(seed)
    began = process_time()
    start = model(seed)
    imitate(start, learned, steps=options.imitate, seed=seed)
    row: dict[str, float] = {"seed": seed, "imitation_s": process_time() - began}
    rewards: tuple[tuple[str, Reward], ...] = (("ppo", exact), ("shuffled", Shuffled(seed)))
    for name, reward in rewards:
        began = process_time()
        with tempfile.TemporaryDirectory() as folder:
            made = trainer(copy_of(start), reward, held_out, seed, Path(folder), options)
            result = made.optimize(learned)
        row["start"] = 100 * result.first["reward"]
        row[name] = 100 * result.last["reward"]
        row[f"{name}_s"] = process_time() - began
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
    """PPO's settings, the same for every seed and both rewards."""
    return PPOTrainer(
        policy_model=policy,
        reward_model=Judge(reward, {row["prompt"] for row in held_out}),
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
    """95% interval of a mean around it."""
    middle = mean(values)
    if len(values) < 2:
        return middle, middle, middle
    half = STUDENT.get(len(values), 2.0) * stdev(values) / math.sqrt(len(values))
    return middle - half, middle, middle + half


if __name__ == "__main__":
    main()
