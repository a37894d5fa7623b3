"""What `reproducible=True` costs: a step with it, against one without, of one model and batch.

    python packages/ms-parallel/benchmarks/reproducible.py --steps 20
    torchrun --standalone --nproc-per-node 2 packages/ms-parallel/benchmarks/reproducible.py

Two engines in the same processes take steps by turns; the figure is the median ratio of neighbors,
by the processor time of this process and by the clock. With several processes they stand on the
data axis, and rank 0 tells.
"""

import argparse
import os
from collections.abc import Callable
from statistics import median
from time import perf_counter, process_time

import torch
import torch.distributed as dist

from ms_parallel import Engine, Layout, NextTokenLoss
from ms_parallel.models import architecture

SIZES = {
    "4 layers of 128, 8 rows of 128": (128, 4, 4096, 8, 128),
    "6 layers of 256, 4 rows of 256": (256, 6, 8192, 4, 256),
    "4 layers of 512, 4 rows of 512": (512, 4, 8192, 4, 512),
}
"""Width, layers and vocabulary; rows of a process and their length."""


def steps(size: str, ranks: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """A step without, and a step with it."""
    width, layers, vocabulary, rows, length = SIZES[size]
    config = architecture(
        "llama",
        {
            "hidden_size": width,
            "intermediate_size": 8 * width // 3 // 32 * 32,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "vocab_size": vocabulary,
        },
    )
    generator = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))
    tokens = torch.randint(0, vocabulary, (rows, length), generator=generator)
    batch = {"tokens": tokens, "targets": tokens.roll(-1, 1)}
    made = []
    for asked in (False, True):
        engine = Engine(config, Layout(data=ranks), reproducible=asked)
        made.append(lambda engine=engine: engine.step(batch, NextTokenLoss()))
    return made[0], made[1]


def timed(act: Callable[[], None]) -> tuple[float, float]:
    """Processor and wall seconds."""
    wall, processor = perf_counter(), process_time()
    act()
    return process_time() - processor, perf_counter() - wall


def main() -> None:
    """Print a line a model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="of each kind")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    for size in SIZES:
        plain, fixed = steps(size, ranks)
        pairs = [(timed(plain), timed(fixed)) for _ in range(arguments.steps + 2)][2:]
        ratios = [median(two[i] / one[i] for one, two in pairs) for i in range(2)]
        took = median(one[1] for one, _ in pairs)
        if dist.get_rank() == 0:
            print(
                f"{size}, data={ranks}: a step {took * 1e3:.1f} ms; reproducible: processor"
                f" {ratios[0]:.3f}, wall {ratios[1]:.3f} times",
                flush=True,
            )


if __name__ == "__main__":
    main()
