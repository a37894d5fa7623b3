"""How do I distill a model into a smaller one?

    python examples/compress/distillation.py --steps 60

Trains a teacher, prunes it to a student (half of the layers, two thirds of each feed-forward), and
fine-tunes two copies of the student with the same settings: one on text alone, one on the teacher's
predictions and hidden states. The output shows the held-out perplexity of all models; the distilled
student is better.
"""

import argparse
import copy
import email
from itertools import islice
from pathlib import Path

import torch

from ms_compress import Tuning, cut_student, perplexity, tune
from ms_data import TokenStream
from ms_parallel import DistributedTrainer, load_model

CORPUS = Path(email.__file__).parent
SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4}


def rows(shards: Path, split: str, count: int) -> torch.Tensor:
    """Rows of 65 tokens (64 inputs and targets)."""
    stream = TokenStream(shards, sequence_length=65, batch_size=8, split=split, seed=1)
    return torch.cat([torch.as_tensor(batch["tokens"]) for batch in islice(stream, count)])


def main(arguments: list[str] | None = None) -> None:
    """Train a teacher, prune it to a student, and fine-tune two copies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("distillation"))
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args(arguments)
    result = DistributedTrainer(
        "llama",
        model_config=SIZES,
        vocab_size=512,
        sequence_length=64,
        batch_size=16,
        learning_rate=4e-3,
        held_out_fraction=0.1,
        output_dir=options.folder / "run",
        device="cpu",
    ).train(CORPUS, steps=2 * options.steps)
    assert result.model_folder is not None
    shards = options.folder / "run" / "shards"
    text, held_out = rows(shards, "train", 24), rows(shards, "held_out", 4)

    teacher = load_model(result.model_folder).eval()
    student = cut_student(teacher, layers=2, inner=128)
    students = {"text alone": student, "the teacher": copy.deepcopy(student)}
    print(f"teacher                    {perplexity(teacher, held_out):8.2f}")
    print(f"student after pruning      {perplexity(student.eval(), held_out):8.2f}")
    for name, model in students.items():
        tuning = Tuning(
            steps=options.steps,
            sequence_length=64,
            learning_rate=2e-3,
            hidden_weight=1.0 if name == "the teacher" else 0.0,
            distill_weight=0.8,
        )
        tune(model.train(), text, tuning, teacher=teacher if name == "the teacher" else None)
        print(f"trained on {name:<15} {perplexity(model.eval(), held_out):8.2f}")


if __name__ == "__main__":
    main()
