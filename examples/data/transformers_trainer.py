"""How do I use ms-data alone in the Trainer of transformers?

    python examples/data/transformers_trainer.py --steps 30

A dozen lines turn a `TokenStream` into a torch `IterableDataset`, with checksummed shards, a seeded
order, and positions that restart at each document. The Trainer is transformers' own, with its
AdamW, schedule and checkpoints; ms-data is the only package used from here.
"""

import argparse
import email
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import IterableDataset

from ms_data import TokenStream, build, train_tokenizer

CORPUS = Path(email.__file__).parent
ROW, BATCH = 64, 16


class Rows(IterableDataset[dict[str, torch.Tensor]]):
    """Rows of a stream in the format of transformers models."""

    def __init__(self, shards: Path, split: str = "train", epochs: int | None = None) -> None:
        self.shards, self.split, self.epochs = shards, split, epochs

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield rows; labels equal the tokens because the model shifts them."""
        stream = TokenStream(
            self.shards, sequence_length=ROW, batch_size=1, split=self.split, epochs=self.epochs
        )
        for batch in stream:
            tokens = torch.as_tensor(batch["tokens"][0])
            positions = torch.as_tensor(batch["positions"][0])
            # Do not predict the first token of a document from the previous document.
            labels = torch.where(positions == 0, -100, tokens)
            yield {"input_ids": tokens, "labels": labels, "position_ids": positions}


def main(arguments: list[str] | None = None) -> None:
    """Build shards and train with transformers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("transformers-trainer"))
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args(arguments)
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "shards").exists():
        train_tokenizer(CORPUS, vocab_size=512, out=folder / "tokenizer.json")
        build(
            CORPUS,
            tokenizer=folder / "tokenizer.json",
            out=folder / "shards",
            held_out_fraction=0.1,
        )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=ROW,
    )
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=TrainingArguments(
            output_dir=str(folder / "run"),
            max_steps=options.steps,
            per_device_train_batch_size=BATCH,
            learning_rate=3e-3,
            logging_steps=10,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
        ),
        train_dataset=Rows(folder / "shards"),
        eval_dataset=Rows(folder / "shards", "held_out", epochs=1),
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    print(f"held-out loss {before:.3f} -> {after:.3f}")
    assert after < before


if __name__ == "__main__":
    main()
