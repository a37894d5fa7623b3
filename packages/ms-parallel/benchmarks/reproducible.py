"""Cost of `reproducible=True`: a step with it relative to a step without it.

    python packages/ms-parallel/benchmarks/reproducible.py --steps 20
    torchrun --standalone --nproc-per-node 2 packages/ms-parallel/benchmarks/reproducible.py

Steps of two engines with the same model and batch alternate in the same processes. The figure is
the median ratio of neighboring steps, in CPU time of this process and in wall-clock time. Several
processes are data ranks, and rank 0 prints the figures.
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
"""Hidden size, layers, vocabulary, rows per process, sequence length."""


def steps(size: str, ranks: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """A step without it, and a step with it."""
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
    functions = []
    for reproducible in (False, True):
        engine = Engine(config, Layout(data=ranks), reproducible=reproducible)
        functions.append(lambda engine=engine: engine.step(batch, NextTokenLoss()))
    return functions[0], functions[1]


def time_call(act: Callable[[], None]) -> tuple[float, float]:
    """CPU and wall-clock seconds."""
    wall, processor = perf_counter(), process_time()
    act()
    return process_time() - processor, perf_counter() - wall


def main() -> None:
    """Print a line per model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="of each kind")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    for size in SIZES:
        plain, reproducible = steps(size, ranks)
        pairs = [(time_call(plain), time_call(reproducible)) for _ in range(arguments.steps + 2)][
            2:
        ]
        ratios = [median(b[i] / a[i] for a, b in pairs) for i in range(2)]
        plain_s = median(a[1] for a, _ in pairs)
        if dist.get_rank() == 0:
            print(
                f"{size}, data={ranks}: a step {plain_s * 1e3:.1f} ms; reproducible: CPU time"
                f" {ratios[0]:.3f}, wall {ratios[1]:.3f} times",
                flush=True,
            )


if __name__ == "__main__":
    main()
