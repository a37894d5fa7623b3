"""What a step costs that saves a checkpoint beside the training, against one that does not.

In one process, steps of both kinds alternate; a save waits for the one before outside of what is
timed, so that each is written whole while the steps behind it run.

    python packages/ms-parallel/benchmarks/background_checkpoints.py --steps 12
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter, process_time, sleep

import torch

from ms_parallel import Engine, NextTokenLoss, checkpoint
from ms_parallel.checkpoint.background import BackgroundSaver

SIZES = {
    "vocab_size": 8192,
    "hidden_size": 320,
    "intermediate_size": 864,
    "num_hidden_layers": 5,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "max_position_embeddings": 512,
}
ROWS, LENGTH = 8, 256
LIMIT = 1.05


def main() -> int:
    """Print the medians, and fail above the limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12, help="of each kind")
    parser.add_argument("--folder", type=Path, help="where checkpoints are written")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    engine = made()
    batch = {"tokens": torch.randint(0, SIZES["vocab_size"], (ROWS, LENGTH))}
    batch["targets"] = batch["tokens"].roll(-1, 1)

    def step() -> None:
        engine.step(batch, NextTokenLoss())

    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        saver = BackgroundSaver(Path(name), 2)
        pairs = [alternate(step, saver, engine) for _ in range(arguments.steps + 2)][2:]
        blocking = waits(Path(name) / "blocking", engine)
        assert saver.rank_plan is not None
        size = sum(saver.rank_plan.part_bytes)
        saver.close()
    wall = median(saved[0] / plain[0] for plain, saved in pairs)
    processor = median(saved[1] / plain[1] for plain, saved in pairs)
    took = median(plain[0] for plain, _ in pairs)
    print(
        f"file {size / 1e6:.0f} MB; step {took * 1e3:.0f} ms; with a save: wall {wall:.3f},"
        f" processor {processor:.3f} of one without; a save that blocks {blocking * 1e3:.0f} ms"
    )
    return int(max(wall, processor) > LIMIT)


def made() -> Engine:
    """A model whose checkpoint is above 100 MB."""
    from ms_parallel.models import architecture

    return Engine(architecture("llama", SIZES), device="cpu")


def alternate(
    step: Callable[[], None], saver: BackgroundSaver, engine: Engine
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Wall and processor seconds of a step without a save, and of one with it."""
    plain = timed(step)

    def saved() -> None:
        step()
        saver.save(engine.step_count, engine.state_dict(), facts={}, note=lambda: None)
        saver.poll()

    found = timed(saved)
    while saver.job is not None:
        sleep(0.01)
        saver.poll()
    return plain, found


def timed(act: Callable[[], None]) -> tuple[float, float]:
    """Wall and processor seconds of this process."""
    wall, processor = perf_counter(), process_time()
    act()
    return perf_counter() - wall, process_time() - processor


def waits(folder: Path, engine: Engine) -> float:
    """Wall seconds of a save that blocks."""
    return timed(lambda: checkpoint.save(folder, engine.state_dict(), step=0, facts={}))[0]


if __name__ == "__main__":
    sys.exit(main())
