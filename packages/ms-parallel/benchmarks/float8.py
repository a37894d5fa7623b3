"""Losses with float8 products, next to those without.

Trains the same small Llama on Python's standard library once per recipe, from the same weights and
in the same order, and evaluates it on held-out text. Products are emulated on a CPU, so the times
say nothing.

    python packages/ms-parallel/benchmarks/float8.py --steps 150
"""

import argparse
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from ms_parallel import DistributedTrainer

MODEL = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
RECIPES = ("none", "rowwise", "blockwise", "mxfp8")
LAST = 10
"""Steps whose losses are averaged."""


def train(folder: Path, dataset: Path, recipe: str, steps: int) -> tuple[Path, list[float], float]:
    """Train once; return the folder of the shards, the last losses and the held-out loss."""
    losses: list[float] = []

    def collect(kind: str, fields: Mapping[str, Any]) -> None:
        if kind == "step":
            losses.append(fields["loss"])

    is_text = not (dataset / "index.json").exists()
    trainer = DistributedTrainer(
        "llama",
        model_config=MODEL,
        float8=recipe,
        sequence_length=128,
        batch_size=8,
        **({"vocab_size": 2048, "held_out_fraction": 0.1} if is_text else {}),
        output_dir=folder / recipe,
        on_event=collect,
        progress=False,
        device="cpu",
    )
    result = trainer.train(dataset_path=dataset, steps=steps)
    return folder / recipe / "shards", losses[-LAST:], result.held_out_loss


def main() -> None:
    """Train with all recipes and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument(
        "--corpus", type=Path, default=Path(sysconfig.get_path("stdlib")) / "asyncio"
    )
    options = parser.parse_args()
    print(f"| float8 | mean loss of the last {LAST} steps | held-out loss | ratio |")
    print("|---|---|---|---|")
    with TemporaryDirectory() as folder:
        dataset, base = options.corpus, 0.0
        for recipe in RECIPES:
            shards, losses, held_out = train(Path(folder), dataset, recipe, options.steps)
            dataset = shards if shards.exists() else dataset
            base = base or held_out
            row = f"{fmean(losses):.4f} | {held_out:.4f} | {held_out / base:.4f}"
            print(f"| `{recipe}` | {row} |", flush=True)


if __name__ == "__main__":
    main()
