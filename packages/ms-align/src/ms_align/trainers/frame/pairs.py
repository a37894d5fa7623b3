"""What training on preference pairs has in common. Shapes: P pairs."""

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
from ms_align.trainers.frame.offline import OfflineLearner, OfflineTrainer


@frozen(kw_only=True, slots=False)
class PairTrainer(OfflineTrainer):
    """What is learnt from, and how long."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.microbatch_size is not None and self.microbatch_size % 2:
            raise ConfigError(
                "microbatch_size must be even, as the two rows of a pair stay together, got"
                f" {self.microbatch_size}; use an even number"
            )

    def stream(self, dataset: Any, engine: Engine, **settings: Any) -> Any:
        """Open the stream of a folder's pairs."""
        given = {
            "sequence_length": self.sequence_length,
            "batch_size": self.batch_size,
            "seed": self.seed,
            **settings,
        }
        return preferences(dataset, engine, **given)

    def count_steps(self, dataset: Any, engine: Engine) -> int:
        """Count the updates in `epochs` passes over a folder's pairs."""
        pairs = int(self.stream(dataset, engine).pairs_per_epoch)
        return -(-pairs * (self.epochs or 1) // self.batch_size)


class PairLearner(OfflineLearner):
    """Learns from pairs, and judges held-out ones."""

    no_targets = (
        "no pair of step {step} has a target or a weight above 0, so nothing would be learned; "
        "look at the data, or raise sequence_length"
    )

    @abstractmethod
    def judge(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Compute each held-out pair's loss (P,), and by how much the chosen one is ahead (P,)."""

    def held_out_metrics(self, held_out: HeldOut) -> Mapping[str, float]:
        """Compute held-out loss, how often the chosen answer is ahead, and by how much."""
        totals = torch.zeros(4, dtype=torch.float64)
        for batch in held_out():
            rows = {name: torch.as_tensor(value) for name, value in batch.items()}
            losses, ahead = self.judge(rows)
            mine = (pair_weights(rows).to(losses.device), losses, ahead)
            weights, loss, gap = (self.engine.gather(one).cpu().double() for one in mine)
            parts = (weights, weights * loss, weights * (gap > 0), weights * gap)
            totals += torch.stack([part.sum() for part in parts])
        weight, total, right, margin = totals.tolist()
        if weight == 0:
            raise NothingToLearnError("the held-out data has no pair; hold out more of it")
        return {
            "held_out_loss": total / weight,
            "held_out_accuracy": right / weight,
            "held_out_margin": margin / weight,
        }
