"""Script of `test_vllm.py`, run in each process of a layout: GRPO with rollouts from a server.

torchrun --nproc-per-node N vllm_layout_run.py FOLDER AXIS URL
"""

import sys
from pathlib import Path

import torch
from small_models import vowels

from ms_align import GRPOTrainer, ServerError

PROMPTS = [[5, 6, 7], [11], [20, 21], [30, 31, 32, 33]]


def main() -> None:
    """Four updates; then a run whose server fails, which must end on every process."""
    torch.set_num_threads(1)
    folder, axis, url = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    settings = {
        "policy_model": folder / "start",
        "layout": {"data": 1} if axis == "one" else {axis: 2},
        "reward_model": vowels,
        "learning_rate": 1e-2,
        "steps": 4,
        "batch_size": 16,
        "num_generations": 4,
        "max_new_tokens": 6,
        "stop_token_ids": tuple(range(0, 258, 9)),
        "progress": False,
        "generator": "vllm",
    }
    GRPOTrainer(**settings, output_dir=folder / axis, vllm={"url": url}).optimize(PROMPTS)
    if axis == "one":
        return
    closed = {"url": "http://127.0.0.1:9", "retries": 0}
    try:
        GRPOTrainer(**settings, output_dir=folder / "failed", vllm=closed).optimize(PROMPTS)
    except ServerError as error:
        with (folder / "errors.txt").open("a") as file:
            file.write(f"{error}\n")


if __name__ == "__main__":
    main()
