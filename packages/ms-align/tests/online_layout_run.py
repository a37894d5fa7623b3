"""Script of test_online_layouts, run with torchrun: PPO and GRPO on an ms-parallel engine.

torchrun --nproc-per-node N online_layout_run.py FOLDER AXIS [NAME [KILL_AT]]

With a NAME, only PPO runs, into FOLDER/NAME with a checkpoint at every update. Reward calls and
events are counted; the first process sends itself SIGKILL at count KILL_AT.
"""

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from small_models import vowels

from ms_align import GRPOTrainer, LoraOptions, PPOTrainer, RLOOTrainer, Sample
from ms_align.events import JsonLines
from ms_align.tokenizer import ByteTokenizer

moments = 0


def moment() -> None:
    """Count a moment and kill the process at the chosen one."""
    global moments
    moments += 1
    if len(sys.argv) > 4 and moments == int(sys.argv[4]):
        os.kill(os.getpid(), signal.SIGKILL)


def reward(samples: Sequence[Sample]) -> list[float]:
    """Share of vowels; called on the first process only."""
    moment()
    return vowels(samples)


def spread(samples: Sequence[Sample]) -> list[float]:
    """Reward with many distinct values, so that advantages are not 0."""
    return [sum(sample.response_tokens) % 7 / 6 for sample in samples]


def train(
    trainer_class: type[Any],
    out: Path,
    steps: int = 4,
    reward_function: Any = reward,
    **settings: Any,
) -> None:
    """Run a trainer and write its events."""
    lines = JsonLines(out / "events.jsonl")

    def on_event(name: str, fields: Mapping[str, Any]) -> None:
        lines(name, fields)
        moment()

    trainer_class(
        **settings,
        reward_model=reward_function,
        learning_rate=1e-3,
        kl_coeff=0.1,
        entropy_coeff=0.01,
        epochs=2,
        steps=steps,
        batch_size=8,
        max_new_tokens=6,
        output_dir=out,
        on_event=on_event,
        progress=False,
    ).optimize([[5, 6, 7], [11], [20, 21], [30, 31, 32, 33], [40], [50, 51]])


def main() -> None:
    """Run four updates per trainer with two rollouts; adapter runs resume after two updates."""
    torch.set_num_threads(1)
    folder, axis = Path(sys.argv[1]), sys.argv[2]
    ranks = {"data": 1} if axis == "one" else {axis: 2}
    start: dict[str, Any] = {"policy_model": folder / "start", "layout": ranks}
    if len(sys.argv) > 3:
        train(PPOTrainer, folder / sys.argv[3], **start, checkpoint_every=1)
        return
    train(PPOTrainer, folder / axis / "PPOTrainer", **start)
    train(
        GRPOTrainer,
        folder / axis / "GRPOTrainer",
        **start,
        num_generations=4,
        tokenizer=ByteTokenizer(),
        stop_token_ids=tuple(range(0, 258, 9)),
        stop_strings=("A", "7", "e "),
    )
    if axis == "tensor":
        return
    for trainer_class in (PPOTrainer, GRPOTrainer, RLOOTrainer):
        out = folder / axis / f"{trainer_class.__name__}-lora"
        groups = {} if trainer_class is PPOTrainer else {"num_generations": 4}
        for steps in (2, 4) if axis != "one" else (4,):
            train(trainer_class, out, steps, spread, **start, **groups, lora=LoraOptions(rank=4))


if __name__ == "__main__":
    main()
