"""Script of `test_layouts.py`: SFT and DPO on data that leaves a rank without targets.

The held-out split has one row or pair, and rows of the second half of each first batch no target.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ms_align import DPOTrainer, SFTTrainer
from ms_data import InstructionStream, PreferenceStream

if __package__:
    from .layout_run import Place, engine_of, quiet
else:
    from layout_run import Place, engine_of, quiet


class HalfEmpty:
    """Stream whose first batch has targets only in its first rows."""

    def __init__(self, stream: Any, place: Place) -> None:
        self.stream, self.place, self.drawn = stream, place, 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = {name: torch.as_tensor(value) for name, value in next(self.stream).items()}
        self.drawn += 1
        if self.drawn == 1:
            rows = len(batch["targets"])
            first = self.place.rank * rows  # of this process's rows in the global batch
            empty = torch.arange(first, first + rows) >= rows * self.place.count // 2
            batch["targets"] = batch["targets"].masked_fill(empty[:, None], -100)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the number of batches read."""
        return {"drawn": self.drawn}

    def load_state_dict(self, state: Any) -> None:
        """Restore the number of batches read."""
        self.drawn = state["drawn"]


def run_uneven(sets: Path, place: Path, layout: dict[str, int] | None) -> dict[str, list[float]]:
    """Return losses, gradient norms and held-out metrics of three updates."""
    found: dict[str, list[float]] = {}
    engine = engine_of(sets, layout)
    mine = Place(engine)
    sizes = {"sequence_length": 64, "place": mine, "batch_size": 4}
    SFTTrainer(model=engine, **quiet(place / "sft", found)).train(
        HalfEmpty(InstructionStream(place / "few", **sizes), mine),
        held_out=lambda: InstructionStream(place / "few", split="held_out", epochs=1, **sizes),
    )
    references = {"model": engine_of(sets, layout), "reference_model": engine_of(sets, layout)}
    DPOTrainer(**references, **quiet(place / "dpo", found)).train(
        HalfEmpty(PreferenceStream(place / "few_pairs", **sizes), mine),
        held_out=lambda: PreferenceStream(place / "few_pairs", split="held_out", epochs=1, **sizes),
    )
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    told = run_uneven(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
    sys.stdout.write(json.dumps(told) + "\n")
