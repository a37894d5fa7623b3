"""What a step costs whose blocks are compiled, against the same step as it is.

In one process and thread, steps of both kinds alternate; the first step of the compiled engine,
which calls the compiler, is told apart. Losses must agree within float32's rounding.

    python packages/ms-parallel/benchmarks/compiled.py --steps 8
"""

import argparse
import sys
from statistics import median
from time import perf_counter, process_time

import torch
from torch import Tensor

from ms_parallel import Engine, NextTokenLoss
from ms_parallel.models import architecture

SIZES = {
    "vocab_size": 4096,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
WIDTHS = ((128, 4, 128), (384, 4, 256))
"""Width of the model, rows of a batch, and their length."""


def engine(width: int, compiled: bool) -> Engine:
    """One of two that begin with the same weights."""
    config = architecture("llama", SIZES | {"hidden_size": width})
    return Engine(config, device="cpu", seed=0, compile=compiled)


def timed(one: Engine, batch: dict[str, Tensor]) -> tuple[float, float, float]:
    """Loss, wall and processor seconds of a step."""
    wall, processor = perf_counter(), process_time()
    loss = one.step(batch, NextTokenLoss()).loss
    return loss, perf_counter() - wall, process_time() - processor


def measure(width: int, rows: int, length: int, steps: int) -> None:
    """Print the medians of steps in turns."""
    plain, compiled = engine(width, False), engine(width, True)
    batch = {"tokens": torch.randint(0, SIZES["vocab_size"], (rows, length))}
    batch["targets"] = batch["tokens"].roll(-1, 1)
    _, first, _ = timed(compiled, batch)
    timed(plain, batch)
    pairs = [(timed(plain, batch), timed(compiled, batch)) for _ in range(steps)]
    for before, after in pairs:
        if abs(before[0] - after[0]) > 1e-4 * before[0]:
            raise SystemExit(f"losses differ: {before[0]} and {after[0]}")
    wall = median(after[1] / before[1] for before, after in pairs)
    processor = median(after[2] / before[2] for before, after in pairs)
    took = median(before[1] for before, _ in pairs)
    print(
        f"width {width}, {rows} x {length}: step {took * 1e3:.0f} ms; compiled: wall {wall:.3f},"
        f" processor {processor:.3f} of it; its first step {first:.1f} s",
        flush=True,
    )


def main() -> int:
    """Measure both sizes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8, help="of each kind")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for width, rows, length in WIDTHS:
        measure(width, rows, length, arguments.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
