"""Started by test_online_layouts under torchrun: PPO and GRPO on an engine of ms-parallel.

torchrun --nproc-per-node N online_layout_run.py FOLDER AXIS
"""

import sys
from pathlib import Path
from typing import Any

import torch

from ms_parallel import Layout

sys.path.insert(0, str(Path(__file__).parent))
from small_models import vowels

from ms_align import GRPOTrainer, PPOTrainer
from ms_align.events import JsonLines
from ms_align.options import OptimizerOptions
from ms_align.parallel import ParallelEngine


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

    for kind, settings in (
        (PPOTrainer, {"policy_model": engine(heads={"value": 1}), "epochs": 2}),
        (GRPOTrainer, {"policy_model": engine(), "group_size": 4, "epochs": 2}),
    ):
        out = folder / axis / kind.__name__
        kind(
            **settings,
            reference_model=engine(),
            reward_model=vowels,
            kl_coeff=0.1,
            entropy_coeff=0.01,
            steps=4,
            batch_size=8,
            max_new_tokens=6,
            output_dir=out,
            on_event=JsonLines(out / "events.jsonl"),
            progress=False,
        ).optimize([[5, 6, 7], [11], [20, 21], [30, 31, 32, 33], [40], [50, 51]])


if __name__ == "__main__":
    main()
