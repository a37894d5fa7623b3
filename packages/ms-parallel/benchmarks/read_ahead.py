"""Waits of training steps for a slow reader, with and without reading ahead.

The reader sleeps before each batch, as if it waited for a disk or the network. Both variants take
the same steps on one thread of the CPU; the figure is the median wait for a batch.

    python packages/ms-parallel/benchmarks/read_ahead.py
"""

import argparse
from collections.abc import Mapping, Sequence
from statistics import median
from time import perf_counter, sleep
from typing import Any

import torch
from bench import SIZES

from ms_parallel import Engine, NextTokenLoss
from ms_parallel.training.read_ahead import ReadAhead


class SlowStream:
    """Random batches, each after a delay."""

    def __init__(self, rows: int, length: int, vocabulary: int, delay_s: float) -> None:
        self.shape, self.vocabulary, self.delay_s = (rows, length), vocabulary, delay_s
        self.position = 0

    def __next__(self) -> Mapping[str, Any]:
        sleep(self.delay_s)
        generator = torch.Generator().manual_seed(self.position)
        tokens = torch.randint(self.vocabulary, self.shape, generator=generator)
        self.position += 1
        return {"tokens": tokens, "targets": tokens.roll(-1, 1)}

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Restore the position."""
        self.position = state["position"]

    def share_out(self, shares: Sequence[int], /) -> None:
        """Do nothing: there is only one rank."""


def main() -> None:
    """Print a table of waits."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--delays-ms", type=float, nargs="+", default=[0.0, 20.0, 60.0])
    options = parser.parse_args()
    torch.set_num_threads(1)
    config, rows, length = SIZES["small"]
    print("| reader, ms | waits without, ms | waits with, ms | losses |\n|---|---|---|---|")
    for delay in options.delays_ms:
        waits, losses = [], []
        for ahead in (False, True):
            stream: Any = SlowStream(rows, length, config.vocab_size, delay / 1000)
            stream = ReadAhead(stream, pin=False) if ahead else stream
            engine, seconds, run_losses = Engine(config, device="cpu"), [], []
            for _ in range(options.steps):
                start = perf_counter()
                batch = next(stream)
                seconds.append(perf_counter() - start)
                run_losses.append(engine.step(batch, NextTokenLoss()).loss)
            if ahead:
                stream.close()
            waits.append(1000 * median(seconds[1:]))  # nothing is read ahead of the first
            losses.append(run_losses)
        equal = "equal" if losses[0] == losses[1] else "DIFFERENT"
        print(f"| {delay:g} | {waits[0]:.2f} | {waits[1]:.2f} | {equal} |")


if __name__ == "__main__":
    main()
