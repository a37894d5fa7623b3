"""Measures the loss on held-out text, which is never trained on."""

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
    """Held-out text of a dataset, and the amount that one evaluation reads."""

    source: Any
    """Dataset that a `TokenStream` reads."""
    sequence_length: int
    batch_size: int
    batches: int
    samples: int
    """Rows (sequences) in the held-out split."""
    data_place: Place

    @classmethod
    def find(
        cls,
        shards: Path,
        data_place: Place,
        rows: int,
        *,
        source: Any,
        sequence_length: int,
        batch_size: int,
        batches: int,
    ) -> "HeldOut | None":
        """Return the held-out text of a dataset; None if there is too little for one batch.

        Args:
            shards: folder of the dataset.
            data_place: this process's data rank and the number of data ranks.
            rows: the batch size is a multiple of this.
            source: the dataset in the form that `TokenStream` takes.
            sequence_length: tokens per row.
            batch_size: maximum rows per batch.
            batches: maximum batches per evaluation.
        """
        split = data_package().inspect(shards).splits.get(SPLIT)
        samples = split.tokens // sequence_length if split else 0
        # The largest multiple of `rows` that the text fills, up to the batch size.
        size = min(batch_size, samples // rows * rows)
        if not size:
            return None
        return cls(
            source=source,
            sequence_length=sequence_length,
            batch_size=size,
            batches=min(batches, samples // size),
            samples=samples,
            data_place=data_place,
        )

    @property
    def rows(self) -> int:
        """Number of rows that one evaluation uses."""
        return self.batches * self.batch_size

    def loss(self, evaluate: Evaluate) -> float:
        """Return the mean loss per held-out token, in nats; every call reads the same text.

        Args:
            evaluate: an engine's `evaluate`.
        """
        stream = data_package().TokenStream(
            self.source,
            sequence_length=self.sequence_length,
            batch_size=self.batch_size,
            place=self.data_place,
            split=SPLIT,
            shuffle=True,
        )
        loss_sum = token_count = 0.0
        for _ in range(self.batches):
            rows = evaluate(next(stream), _sum_and_count).double().sum(0).tolist()
            loss_sum, token_count = loss_sum + rows[0], token_count + rows[1]
        # All ranks of a replica have the same rows, which scales both sums by the same factor.
        loss_sum, token_count = sums(loss_sum, token_count)
        return loss_sum / token_count


def _sum_and_count(output: Output, batch: Batch) -> Tensor:
    """Return (b, 2): the sum of each row's token losses, and the number of tokens in it."""
    targets = batch["targets"]
    losses = output.token_losses(targets)
    return torch.stack([losses.sum(1), (targets >= 0).sum(1).to(losses.dtype)], dim=1)
