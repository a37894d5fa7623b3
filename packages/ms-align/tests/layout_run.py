"""Script of `test_layouts.py`, run in each process of a layout: SFT, then DPO."""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from ms_align import (
    DPOTrainer,
    LoraOptions,
    SFTTrainer,
    TaskOptions,
)
from ms_align.engines.assembly import start_engine
from ms_align.engines.optimizer import OptimizerOptions
from ms_data import InstructionStream, PreferenceStream

OPTIMIZER = OptimizerOptions(learning_rate=1e-3, warmup_steps=2)


class DataRank:
    """Data rank of an engine, in the form streams expect."""

    def __init__(self, engine: Any) -> None:
        self.rank, self.count = engine.data_rank, engine.data_ranks


def run(sets: Path, folder: Path, layout: dict[str, int] | None) -> dict[str, list[float]]:
    """Return losses, gradient norms and held-out metrics of a few updates."""
    metrics: dict[str, list[float]] = {}
    engine = start_sets_engine(sets, layout)
    sources = {"copy": sets / "copy", "reverse": sets / "reverse"}
    sizes = {"sequence_length": 64, "place": DataRank(engine)}
    tasks = TaskOptions(warmup_steps=1, correction=1.0)
    SFTTrainer(model=engine, tasks=tasks, **quiet(folder / "sft", metrics)).train(
        InstructionStream(sources, batch_size=4, **sizes),
        held_out=lambda: InstructionStream(
            sources, batch_size=4, split="held_out", epochs=1, **sizes
        ),
    )
    references = {
        "model": start_sets_engine(sets, layout),
        "reference_model": start_sets_engine(sets, layout),
    }
    losses = ["sigmoid", "ipo", "simpo"]  # sums, token means with and without a reference
    DPOTrainer(**references, loss_type=losses, **quiet(folder / "dpo", metrics)).train(
        PreferenceStream(sets / "pairs", batch_size=4, **sizes),
        held_out=lambda: PreferenceStream(
            sets / "pairs", batch_size=4, split="held_out", epochs=1, **sizes
        ),
    )
    # The same settings through the trainer's keys, as in a run file.
    DPOTrainer(
        model=str(sets / "model"),
        layout=layout,
        lora=LoraOptions(rank=4),
        learning_rate=OPTIMIZER.learning_rate,
        warmup_steps=OPTIMIZER.warmup_steps,
        microbatch_size=2,
        **quiet(folder / "lora", metrics),
    ).train(PreferenceStream(sets / "pairs", batch_size=4, **sizes))
    return metrics


def start_sets_engine(sets: Path, layout: dict[str, int] | None) -> Any:
    """Start an engine of the datasets' model, in one process or under a layout."""
    return start_engine(sets / "model", layout=layout, optimizer=OPTIMIZER, microbatch_size=2)


def quiet(folder: Path, metrics: dict[str, list[float]]) -> dict[str, Any]:
    """Settings of three updates without progress output."""

    def on_event(kind: str, fields: Any) -> None:
        if kind in ("step", "evaluate", "tasks"):
            for name, value in fields.items():
                if not name.startswith("rate_") and name != "tokens":
                    metrics.setdefault(f"{folder.name} {kind} {name}", []).append(float(value))

    return {"steps": 3, "output_dir": folder, "progress": False, "on_event": on_event}


if __name__ == "__main__":
    torch.set_num_threads(1)
    metrics = run(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
    sys.stdout.write(json.dumps(metrics) + "\n")
