"""Step time with a background checkpoint, relative to a step without one.

Steps of both kinds alternate in one process. Waiting for the previous save is not timed, so each
checkpoint is written completely while the next steps run.

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
    """Print the medians, and exit with 1 above the limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12, help="of each kind")
    parser.add_argument("--folder", type=Path, help="folder for checkpoints")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    engine = large_engine()
    batch = {"tokens": torch.randint(0, SIZES["vocab_size"], (ROWS, LENGTH))}
    batch["targets"] = batch["tokens"].roll(-1, 1)

    def step() -> None:
        engine.step(batch, NextTokenLoss())

    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        saver = BackgroundSaver(Path(name), 2)
        pairs = [alternate(step, saver, engine) for _ in range(arguments.steps + 2)][2:]
        blocking = blocking_seconds(Path(name) / "blocking", engine)
        assert saver.rank_plan is not None
        size = sum(saver.rank_plan.part_bytes)
        saver.close()
    wall = median(saved[0] / plain[0] for plain, saved in pairs)
    processor = median(saved[1] / plain[1] for plain, saved in pairs)
    step_s = median(plain[0] for plain, _ in pairs)
    print(
        f"file {size / 1e6:.0f} MB; step {step_s * 1e3:.0f} ms; with a save: wall {wall:.3f},"
        f" processor {processor:.3f} of one without; a save that blocks {blocking * 1e3:.0f} ms"
    )
    return int(max(wall, processor) > LIMIT)


def large_engine() -> Engine:
    """An engine whose checkpoint is larger than 100 MB."""
    from ms_parallel.models import architecture

    return Engine(architecture("llama", SIZES), device="cpu")


def alternate(
    step: Callable[[], None], saver: BackgroundSaver, engine: Engine
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Wall-clock and CPU seconds of a step without a save, and of one with it."""
    plain = time_call(step)

    def saved() -> None:
        step()
        saver.save(engine.step_count, engine.state_dict(), facts={}, note=lambda: None)
        saver.poll()

    with_save = time_call(saved)
    while saver.job is not None:
        sleep(0.01)
        saver.poll()
    return plain, with_save


def time_call(act: Callable[[], None]) -> tuple[float, float]:
    """Wall-clock and CPU seconds of this process."""
    wall, processor = perf_counter(), process_time()
    act()
    return perf_counter() - wall, process_time() - processor


def blocking_seconds(folder: Path, engine: Engine) -> float:
    """Wall-clock seconds of a blocking save."""
    return time_call(lambda: checkpoint.save(folder, engine.state_dict(), step=0, facts={}))[0]


if __name__ == "__main__":
    sys.exit(main())
