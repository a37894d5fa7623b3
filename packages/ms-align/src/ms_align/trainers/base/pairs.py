"""Training on preference pairs, shared by DPO and reward models. Shapes: P pairs."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from ms_align.engines.protocol import Engine
from ms_align.errors import ConfigError, NothingToLearnError
from ms_align.losses.dpo import pair_weights
from ms_align.streams.folders import preferences
from ms_align.streams.protocol import HeldOut
from ms_align.trainers.base.offline import OfflineLearner, OfflineTrainer


@frozen(kw_only=True, slots=False)
class PairTrainer(OfflineTrainer):
    """Settings for training on pairs; adjacent rows of a batch are a pair."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.microbatch_size is not None and self.microbatch_size % 2:
            raise ConfigError(
                "microbatch_size must be even, as the two rows of a pair stay together, got"
                f" {self.microbatch_size}; use an even number"
            )

    def stream(self, dataset: Any, engine: Engine, **settings: Any) -> Any:
        """Open the stream of pairs in a dataset folder."""
        options = {
            "sequence_length": self.sequence_length,
            "batch_size": self.batch_size,
            "seed": self.seed,
            **settings,
        }
        return preferences(dataset, engine, **options)

    def count_steps(self, dataset: Any, engine: Engine) -> int:
        """Count the updates in `epochs` passes over a folder's pairs."""
        pairs = int(self.stream(dataset, engine).pairs_per_epoch)
        return -(-pairs * (self.epochs or 1) // self.batch_size)


class PairLearner(OfflineLearner):
    """Learns from preference pairs and evaluates held-out ones."""

    no_targets = (
        "no pair of step {step} has target tokens and a weight above 0, so nothing would be "
        "learned; check the data, or raise sequence_length"
    )

    @abstractmethod
    def pair_losses(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return each held-out pair's loss and margin (chosen minus rejected), (P,) each."""

    def held_out_metrics(self, held_out: HeldOut) -> Mapping[str, float]:
        """Return held-out loss, accuracy (chosen above rejected) and margin."""
        totals = torch.zeros(4, dtype=torch.float64)  # weight, loss, accuracy, margin
        for batch in held_out():
            rows = {name: torch.as_tensor(value) for name, value in batch.items()}
            losses, margins = self.pair_losses(rows)
            # This data rank's pairs; gather returns the pairs of all ranks.
            local = (pair_weights(rows).to(losses.device), losses, margins)
            weights, loss, gap = (self.engine.gather(column).cpu().double() for column in local)
            parts = (weights, weights * loss, weights * (gap > 0), weights * gap)  # (P,) each
            totals += torch.stack([part.sum() for part in parts])
        weight, total, correct, margin = totals.tolist()
        if weight == 0:
            raise NothingToLearnError("the held-out data has no pairs; hold out more")
        return {
            "held_out_loss": total / weight,
            "held_out_accuracy": correct / weight,
            "held_out_margin": margin / weight,
        }
