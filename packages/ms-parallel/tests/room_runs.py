"""Runs in little memory: called by `run_processes`, each in fresh processes."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from memory_runs import Room

from ms_parallel.cluster.connection import connect
from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.engine import Engine
from ms_parallel.engine.loss import NextTokenLoss
from ms_parallel.errors import ConfigError
from ms_parallel.planner.rank_memory import RankMemory
from ms_parallel.training.fitting import engine_settings, fit_model
from ms_parallel.training.memory import run_memory
from ms_parallel.training.microbatch_size import settled, try_out
from ms_parallel.training.options import Options

UPDATES = 3


def foretold(layout: str, settings: dict[str, Any], sizes: list[int]) -> dict[str, Any]:
    """What each pipeline rank holds, by rows of a microbatch."""
    options = Options("llama", device="cpu", **settings)
    each = {rows: run_memory(options, Layout.parse(layout), None, rows) for rows in sizes}
    return {str(rows): [msgspec.structs.asdict(rank) for rank in each[rows]] for rows in sizes}


def trained(
    room_bytes: int,
    layout: str,
    settings: dict[str, Any],
    size: int | str,
    foretold: Mapping[str, Any],
) -> dict[str, Any]:
    """Train as `DistributedTrainer` begins a run, where the last rank has so much more memory.

    Args:
        room_bytes: that it may take.
        layout: of the processes.
        settings: of the run.
        size: of microbatches.
        foretold: what each size was predicted to hold.

    Returns:
        `rows` of a microbatch; or why there are none, `refused`; or that memory ran out, `failed`.
    """
    torch.set_num_threads(1)
    split = Layout.parse(layout)
    folder = tempfile.mkdtemp()
    asked = Options(
        "llama", device="cpu", output_dir=Path(folder), microbatch_size=size, **settings
    )
    config = fit_model(asked, split, None)
    groups = connect(split, device="cpu", timeout_s=60)

    def predict(rows: int) -> list[RankMemory]:
        return [RankMemory(**rank) for rank in foretold[str(rows)]]

    generator = torch.Generator().manual_seed(0)
    rows = asked.batch_size // split.readers
    shape = (rows, asked.sequence_length + 1)
    text = torch.randint(0, config.vocab_size, shape, generator=generator)
    with Room(room_bytes):
        try:
            options = settled(asked, split, predict)
            engine = Engine(config, groups=groups, **engine_settings(options, split, 8))
            try_out(engine, asked, split, predict)
            for _ in range(UPDATES):
                engine.update({"tokens": text[:, :-1], "targets": text[:, 1:]}, NextTokenLoss())
        except ConfigError as error:
            return {"refused": str(error)}
        except (MemoryError, RuntimeError) as error:
            return {"failed": str(error)}
    return {"rows": engine.passes.microbatch_size or rows}
