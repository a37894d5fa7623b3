"""How do I watch a training run in TensorBoard, Weights & Biases or MLflow?

    python examples/profile/trackers.py --to tensorboard --to mlflow --to wandb

Three lines: a `Tracker` around the destinations, and `on_event=tracker`. No data leaves the
machine: W&B runs offline, and MLflow writes to a local database. The second run resumes from the
first run's checkpoint and continues the same curves. To see them:
tensorboard --logdir trackers/tensorboard;
mlflow ui --backend-store-uri sqlite:///trackers/mlflow.db; wandb sync --append trackers/wandb/off*.
"""

import argparse
import email
from collections.abc import Callable
from pathlib import Path

from ms_parallel import DistributedTrainer
from ms_profile.trackers import Destination, MLflow, TensorBoard, Tracker, Wandb

SIZES = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2}
DESTINATIONS: dict[str, Callable[[Path], Destination]] = {
    "tensorboard": lambda folder: TensorBoard(folder / "tensorboard"),
    "wandb": lambda folder: Wandb(folder, project="examples", mode="offline"),
    "mlflow": lambda folder: MLflow(
        folder, experiment="examples", tracking_uri=f"sqlite:///{folder / 'mlflow.db'}"
    ),
}


def train(folder: Path, names: list[str], *, steps: int, rate: float) -> None:
    """Train to step `steps`, resuming from the last checkpoint in `folder`."""
    destinations = [DESTINATIONS[name](folder) for name in names]
    with Tracker(*destinations, name="mail", settings={"learning_rate": rate}) as tracker:
        trainer = DistributedTrainer(
            "llama",
            model_config=SIZES,
            vocab_size=512,
            sequence_length=64,
            batch_size=8,
            learning_rate=rate,
            held_out_fraction=0.1,
            output_dir=folder / "run",
            device="cpu",
            on_event=tracker,
        )
        result = trainer.train(Path(email.__file__).parent, steps=steps)
    print(f"step {result.step}: loss {result.loss:.3f}, {tracker.lost} events lost", flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Train in two runs with tracking."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("trackers"))
    parser.add_argument("--to", action="append", choices=sorted(DESTINATIONS))
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    for steps in (options.steps // 2, options.steps):
        train(options.folder, options.to or ["tensorboard"], steps=steps, rate=3e-3)


if __name__ == "__main__":
    main()
