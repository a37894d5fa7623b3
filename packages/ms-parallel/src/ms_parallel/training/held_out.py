"""The loss on text that is never trained on; the same number on every process."""

from pathlib import Path

import torch
from attrs import frozen
from torch import Tensor

from ms_parallel.cluster.agreement import sums
from ms_parallel.cluster.layout import Place
from ms_parallel.engine.engine import Engine
from ms_parallel.engine.loss import Batch, Output
from ms_parallel.training.dataset import data_package
from ms_parallel.training.options import Options

__all__ = ["HeldOut"]

SPLIT = "held_out"


@frozen(kw_only=True)
class HeldOut:
    """Where the held-out text is and how much of it one evaluation takes."""

    shards: Path
    sequence_length: int
    batch_size: int
    batches: int
    place: Place

    @classmethod
    def find(cls, shards: Path, options: Options, place: Place, rows: int) -> "HeldOut | None":
        """The held-out text of a dataset, None where it has none or too little.

        Args:
            shards: folder of the dataset.
            options: the run's.
            place: this process's, among those that read different rows.
            rows: a batch is a multiple of it.
        """
        split = data_package().inspect(shards).splits.get(SPLIT)
        samples = split.tokens // options.sequence_length if split else 0
        size = min(options.batch_size, samples // rows * rows)
        if not size:
            return None
        return cls(
            shards=shards,
            sequence_length=options.sequence_length,
            batch_size=size,
            batches=min(options.evaluate_batches, samples // size),
            place=place,
        )

    def loss(self, engine: Engine) -> float:
        """Mean of -log p of a held-out token, in nats; the same text at every call."""
        stream = data_package().TokenStream(
            self.shards,
            sequence_length=self.sequence_length,
            batch_size=self.batch_size,
            place=self.place,
            split=SPLIT,
            shuffle=True,
        )
        total = count = 0.0
        for _ in range(self.batches):
            rows = engine.evaluate(next(stream), _sum_and_count).double().sum(0).tolist()
            total, count = total + rows[0], count + rows[1]
        # Every rank of a replica has the same rows: numerator and divisor are both that many
        # times too great.
        total, count = sums(total, count)
        return total / count


def _sum_and_count(output: Output, batch: Batch) -> Tensor:
    """(b, 2): the sum of a row's token losses, and how many tokens have one."""
    targets = batch["targets"]
    losses = output.token_losses(targets)
    return torch.stack([losses.sum(1), (targets >= 0).sum(1).to(losses.dtype)], dim=1)
