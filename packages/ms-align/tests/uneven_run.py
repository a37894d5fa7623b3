"""Script of `test_layouts.py`: SFT and DPO on data that leaves a rank without targets.

The held-out split has a single row or pair, and the second half of each first batch has no targets.
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
    from .layout_run import DataRank, quiet, start_sets_engine
else:
    from layout_run import DataRank, quiet, start_sets_engine


class HalfEmpty:
    """Stream whose first batch has targets only in its first rows."""

    def __init__(self, stream: Any, data_rank: DataRank) -> None:
        self.stream, self.data_rank, self.drawn = stream, data_rank, 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = {name: torch.as_tensor(value) for name, value in next(self.stream).items()}
        self.drawn += 1
        if self.drawn == 1:
            rows = len(batch["targets"])
            first = self.data_rank.rank * rows  # of this process's rows in the global batch
            empty = torch.arange(first, first + rows) >= rows * self.data_rank.count // 2
            batch["targets"] = batch["targets"].masked_fill(empty[:, None], -100)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the number of batches read."""
        return {"drawn": self.drawn}

    def load_state_dict(self, state: Any) -> None:
        """Restore the number of batches read."""
        self.drawn = state["drawn"]


def run_uneven(sets: Path, folder: Path, layout: dict[str, int] | None) -> dict[str, list[float]]:
    """Return losses, gradient norms and held-out metrics of three updates."""
    metrics: dict[str, list[float]] = {}
    engine = start_sets_engine(sets, layout)
    data_rank = DataRank(engine)
    sizes = {"sequence_length": 64, "place": data_rank, "batch_size": 4}
    SFTTrainer(model=engine, **quiet(folder / "sft", metrics)).train(
        HalfEmpty(InstructionStream(folder / "few", **sizes), data_rank),
        held_out=lambda: InstructionStream(folder / "few", split="held_out", epochs=1, **sizes),
    )
    references = {
        "model": start_sets_engine(sets, layout),
        "reference_model": start_sets_engine(sets, layout),
    }
    DPOTrainer(**references, **quiet(folder / "dpo", metrics)).train(
        HalfEmpty(PreferenceStream(folder / "few_pairs", **sizes), data_rank),
        held_out=lambda: PreferenceStream(
            folder / "few_pairs", split="held_out", epochs=1, **sizes
        ),
    )
    return metrics


if __name__ == "__main__":
    torch.set_num_threads(1)
    metrics = run_uneven(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
    sys.stdout.write(json.dumps(metrics) + "\n")
