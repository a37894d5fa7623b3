"""How do I train with data, tensor and pipeline parallelism at once?

    torchrun --standalone --nproc-per-node 8 examples/train/three_dimensional_layout.py --steps 6

Eight processes, 2 x 2 x 2: batches, weight matrices and layers are each split in two. The script is
the same as for a single process, except for `parallel_config`, and the losses are the same. With
fewer processes it uses fewer axes.
"""

import argparse
import email
import os
from pathlib import Path

from ms_parallel import DistributedTrainer

AXES = {1: {}, 2: {"data": 2}, 4: {"data": 2, "tensor": 2}}
CUBE = {"data": 2, "tensor": 2, "pipeline": 2}


def main(arguments: list[str] | None = None) -> None:
    """Train; runs in every process, and rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("three-dimensional-layout"))
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args(arguments)
    count = int(os.environ.get("WORLD_SIZE", "1"))
    result = DistributedTrainer(
        "llama",
        parallel_config=AXES.get(count, CUBE),
        model_config={"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4},
        vocab_size=512,
        sequence_length=64,
        batch_size=16,
        microbatch_size=2,
        schedule="zb-h1" if count == 8 else "1f1b",
        learning_rate=3e-3,
        held_out_fraction=0.1,
        output_dir=options.folder,
        device="cpu",
        log_every=1,
    ).train(Path(email.__file__).parent, steps=options.steps)
    if os.environ.get("RANK", "0") == "0":
        print(f"held-out loss {result.first_held_out_loss:.4f} -> {result.held_out_loss:.4f}")


if __name__ == "__main__":
    main()
