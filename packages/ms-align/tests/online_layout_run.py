"""Started by test_online_layouts under torchrun: PPO and GRPO on an engine of ms-parallel.

torchrun --nproc-per-node N online_layout_run.py FOLDER AXIS [NAME [KILL_AT]]

With a NAME, PPO alone, kept there with a checkpoint at each update; at the moment KILL_AT, counted
in rewards' calls and events, the first process ends itself with SIGKILL.
"""

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ms_parallel import Layout

sys.path.insert(0, str(Path(__file__).parent))
from small_models import vowels

from ms_align import GRPOTrainer, PPOTrainer, Sample
from ms_align.engines.optimizer import OptimizerOptions
from ms_align.engines.parallel import ParallelEngine
from ms_align.events import JsonLines
from ms_align.tokenizer import ByteTokenizer

moments = 0


def moment() -> None:
    """Count, and end the process if this is the one."""
    global moments
    moments += 1
    if len(sys.argv) > 4 and moments == int(sys.argv[4]):
        os.kill(os.getpid(), signal.SIGKILL)


def reward(samples: Sequence[Sample]) -> list[float]:
    """Vowels; asked on the first process alone."""
    moment()
    return vowels(samples)


def main() -> None:
    """Four updates of each, two rollouts."""
    torch.set_num_threads(1)
    folder, axis = Path(sys.argv[1]), sys.argv[2]
    layout = Layout() if axis == "one" else Layout(**{axis: 2})

    def engine(**more: Any) -> ParallelEngine:
        optimizer = OptimizerOptions(learning_rate=1e-3)
        return ParallelEngine.start(
            folder / "start", layout, optimizer=optimizer, device="cpu", **more
        )

    def train(kind: type[Any], out: Path, **settings: Any) -> None:
        lines = JsonLines(out / "events.jsonl")

        def on_event(name: str, fields: Mapping[str, Any]) -> None:
            lines(name, fields)
            moment()

        kind(
            **settings,
            reference_model=engine(),
            reward_model=reward,
            kl_coeff=0.1,
            entropy_coeff=0.01,
            epochs=2,
            steps=4,
            batch_size=8,
            max_new_tokens=6,
            output_dir=out,
            on_event=on_event,
            progress=False,
        ).optimize([[5, 6, 7], [11], [20, 21], [30, 31, 32, 33], [40], [50, 51]])

    ppo = engine(heads={"value": 1})
    if len(sys.argv) > 3:
        train(PPOTrainer, folder / sys.argv[3], policy_model=ppo, checkpoint_every=1)
        return
    train(PPOTrainer, folder / axis / "PPOTrainer", policy_model=ppo)
    train(
        GRPOTrainer,
        folder / axis / "GRPOTrainer",
        policy_model=engine(),
        group_size=4,
        tokenizer=ByteTokenizer(),
        stop_tokens=tuple(range(0, 258, 9)),
        stop_strings=("A", "7", "e "),
    )


if __name__ == "__main__":
    main()
