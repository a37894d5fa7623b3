"""Measures the loss on text that is never trained on; the same number on every process."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from ms_parallel.cluster.agreement import sums
from ms_parallel.cluster.layout import Place
from ms_parallel.engine.loss import Output
from ms_parallel.models.batch import Batch
from ms_parallel.training.optional import data_package

SPLIT = "held_out"
Evaluate = Callable[[Mapping[str, Any], Callable[[Output, Batch], Tensor]], Tensor]


@frozen(kw_only=True)
class HeldOut:
    """Where the held-out text is and how much of it one evaluation takes."""

    shards: Path
    sequence_length: int
    batch_size: int
    batches: int
    samples: int
    """Rows of the held-out text."""
    place: Place

    @classmethod
    def find(
        cls,
        shards: Path,
        place: Place,
        rows: int,
        *,
        sequence_length: int,
        batch_size: int,
        batches: int,
    ) -> "HeldOut | None":
        """Find the held-out text of a dataset; None where it has none or too little.

        Args:
            shards: folder of the dataset.
            place: this process's, among those that read different rows.
            rows: a batch is a multiple of it.
            sequence_length: tokens of a row.
            batch_size: rows of a batch, at most.
            batches: of one evaluation, at most.
        """
        split = data_package().inspect(shards).splits.get(SPLIT)
        samples = split.tokens // sequence_length if split else 0
        size = min(batch_size, samples // rows * rows)
        if not size:
            return None
        return cls(
            shards=shards,
            sequence_length=sequence_length,
            batch_size=size,
            batches=min(batches, samples // size),
            samples=samples,
            place=place,
        )

    @property
    def rows(self) -> int:
        """Rows of one evaluation."""
        return self.batches * self.batch_size

    def loss(self, evaluate: Evaluate) -> float:
        """Compute the mean of -log p of a held-out token, in nats; the same text at every call.

        Args:
            evaluate: an engine's.
        """
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
            rows = evaluate(next(stream), _sum_and_count).double().sum(0).tolist()
            total, count = total + rows[0], count + rows[1]
        # Every rank of a replica has the same rows: numerator and divisor are both that many
        # times too great.
        total, count = sums(total, count)
        return total / count


def _sum_and_count(output: Output, batch: Batch) -> Tensor:
    """Return (b, 2): the sum of a row's token losses, and how many tokens have one."""
    targets = batch["targets"]
    losses = output.token_losses(targets)
    return torch.stack([losses.sum(1), (targets >= 0).sum(1).to(losses.dtype)], dim=1)
