"""Step time with compiled blocks, relative to eager blocks.

Eager and compiled steps alternate in one process with one thread. The first compiled step, which
includes compilation, is reported separately. Losses must agree within float32 rounding.

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
"""Pairs of hidden size, batch size and sequence length."""


def build(width: int, compiled: bool) -> Engine:
    """Build an engine; the seed gives both the same weights."""
    config = architecture("llama", SIZES | {"hidden_size": width})
    return Engine(config, device="cpu", seed=0, compile=compiled)


def timed_step(engine: Engine, batch: dict[str, Tensor]) -> tuple[float, float, float]:
    """Take a step; return its loss, wall-clock seconds and CPU seconds."""
    wall, cpu = perf_counter(), process_time()
    loss = engine.step(batch, NextTokenLoss()).loss
    return loss, perf_counter() - wall, process_time() - cpu


def measure(width: int, rows: int, length: int, steps: int) -> None:
    """Alternate eager and compiled steps; print the median ratios."""
    eager, compiled = build(width, False), build(width, True)
    batch = {"tokens": torch.randint(0, SIZES["vocab_size"], (rows, length))}
    batch["targets"] = batch["tokens"].roll(-1, 1)
    _, first, _ = timed_step(compiled, batch)
    timed_step(eager, batch)
    pairs = [(timed_step(eager, batch), timed_step(compiled, batch)) for _ in range(steps)]
    for without, with_compile in pairs:
        if abs(without[0] - with_compile[0]) > 1e-4 * without[0]:
            raise SystemExit(f"losses differ: {without[0]} and {with_compile[0]}")
    wall = median(with_compile[1] / without[1] for without, with_compile in pairs)
    cpu = median(with_compile[2] / without[2] for without, with_compile in pairs)
    eager_s = median(without[1] for without, _ in pairs)
    print(
        f"hidden size {width}, batch {rows} x {length}: eager step {eager_s * 1e3:.0f} ms;"
        f" compiled/eager: wall {wall:.3f}, CPU {cpu:.3f}; first compiled step {first:.1f} s",
        flush=True,
    )


def main() -> int:
    """Measure all sizes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8, help="eager and compiled steps each")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for width, rows, length in WIDTHS:
        measure(width, rows, length, arguments.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
