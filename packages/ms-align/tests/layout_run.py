"""Run by `test_layouts.py` in each process of a layout: SFT, then DPO; tells what they came to."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ms_align import (
    DPOTrainer,
    LoraOptions,
    ParallelEngine,
    SFTOptions,
    SFTTrainer,
    TaskOptions,
    add_lora,
)
from ms_align.engines.local import LocalEngine
from ms_align.engines.optimizer import OptimizerOptions
from ms_align.run.options import RunOptions
from ms_data import InstructionStream, PreferenceStream

OPTIMIZER = OptimizerOptions(learning_rate=1e-3, warmup_steps=2)


class Place:
    """Where an engine reads."""

    def __init__(self, engine: Any) -> None:
        self.rank, self.count = engine.data_rank, engine.data_ranks


def run(
    sets: Path, place: Path, layout: dict[str, int] | None, device: str | None = "cpu"
) -> dict[str, list[float]]:
    """Losses, gradient norms and held-out figures of a few updates."""
    found: dict[str, list[float]] = {}
    engine = engine_of(sets, layout, device=device)
    sources = {"copy": sets / "copy", "reverse": sets / "reverse"}
    sizes = {"sequence_length": 64, "place": Place(engine)}
    SFTTrainer(
        engine,
        InstructionStream(sources, batch_size=4, **sizes),
        held_out=lambda: InstructionStream(
            sources, batch_size=4, split="held_out", epochs=1, **sizes
        ),
        sft=SFTOptions(tasks=TaskOptions(warmup_steps=1, correction=1.0)),
        options=options(place / "sft", found),
    ).train(3)
    engine = engine_of(sets, layout, device=device)
    DPOTrainer(
        engine,
        PreferenceStream(sets / "pairs", batch_size=4, **sizes),
        reference=engine_of(sets, layout, device=device),
        held_out=lambda: PreferenceStream(
            sets / "pairs", batch_size=4, split="held_out", epochs=1, **sizes
        ),
        options=options(place / "dpo", found),
    ).train(3)
    if layout is None or "tensor" not in layout:
        engine = engine_of(sets, layout, LoraOptions(rank=4), device)
        DPOTrainer(
            engine,
            PreferenceStream(sets / "pairs", batch_size=4, **sizes),
            options=options(place / "lora", found),
        ).train(3)
    return found


def engine_of(
    sets: Path,
    layout: dict[str, int] | None,
    lora: LoraOptions | None = None,
    device: str | None = "cpu",
) -> Any:
    """The sets' model in one process, or split; with adapters, if there are any."""
    if layout is None:
        from ms_parallel import load_model

        model: nn.Module = load_model(sets / "model")
        model.to(device or torch.accelerator.current_accelerator() or "cpu")
        return LocalEngine(add_lora(model, lora) if lora else model, OPTIMIZER, microbatch_size=2)
    from ms_parallel import Layout

    engine = ParallelEngine.start(
        sets / "model", Layout(**layout), optimizer=OPTIMIZER, microbatch_size=2, device=device
    )
    if lora:
        engine.adapt(lora)
    return engine


def options(place: Path, found: dict[str, list[float]]) -> RunOptions:
    """Every figure of every event is kept; no checkpoint but the last."""

    def on_event(kind: str, fields: Any) -> None:
        if kind in ("step", "evaluate", "tasks"):
            for name, value in fields.items():
                if not name.startswith("rate_") and name != "tokens":
                    found.setdefault(f"{place.name} {kind} {name}", []).append(float(value))

    return RunOptions(output_dir=place, progress=False, on_event=on_event)


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = run(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
    sys.stdout.write(json.dumps(found) + "\n")
