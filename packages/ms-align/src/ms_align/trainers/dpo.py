"""DPO and its variants: preference optimization without a reward model."""

from collections.abc import Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from ms_align.engines.protocol import Engine
from ms_align.engines.reference import Reference
from ms_align.losses.dpo import DPOLoss
from ms_align.losses.preference import DPOOptions
from ms_align.run.initial_weights import weights_checksum
from ms_align.streams.protocol import next_batch
from ms_align.streams.text_ends import TextEnds
from ms_align.trainers.base.offline import TrainingData
from ms_align.trainers.base.pairs import PairLearner, PairTrainer
from ms_align.trainers.base.reference import ReferenceTrainer


@frozen(kw_only=True, slots=False)
class DPOTrainer(DPOOptions, ReferenceTrainer, PairTrainer):
    """Optimize preferences directly, without a reward model.

    `DPOTrainer(model=model, loss_type="ipo", steps=100).train(dataset)`; every setting is a keyword
    argument, and training starts with `train`. SimPO, CPO and ORPO need no reference model.

    Raises:
        ConfigError: a setting has the wrong type or is out of range.
    """

    algorithm = "dpo"

    def learner(self, engine: Engine, data: TrainingData, ends: TextEnds) -> "DPOLearner":
        """Build the learner of the loss in `loss_type`."""
        reference = self.reference(engine) if self.needs_reference else None
        return DPOLearner(engine, data, ends, self.subset(DPOLoss), reference)


class DPOLearner(PairLearner):
    """Learns from preference pairs by their log-ratios to the reference."""

    def __init__(
        self,
        engine: Engine,
        data: TrainingData,
        ends: TextEnds,
        loss: DPOLoss,
        reference: Reference | None,
    ) -> None:
        super().__init__(engine, data, ends)
        self._loss = loss
        self.reference = reference
        self.identity = {"policy": weights_checksum(engine)}
        if reference is not None:
            self.identity |= {"reference": weights_checksum(reference.engine)}

    def loss(self) -> DPOLoss:
        """Return the loss of the next update."""
        return self._loss

    def next_batch(self) -> Mapping[str, Any]:
        """Read the next batch and add `reference_logprobs` (B,)."""
        return self._with_reference_logprobs(next_batch(self.data.stream))

    def _with_reference_logprobs(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.reference is None:
            return batch
        rows = {name: torch.as_tensor(value) for name, value in batch.items()}
        # Computed once per batch, before the policy changes.
        with self.reference.activate():
            logprobs = self.reference.engine.evaluate(rows, self._loss.row_logprobs)
        return {**rows, "reference_logprobs": logprobs.cpu()}

    def pair_losses(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the loss and the margin of the implicit rewards, (P,) each."""
        rows = self._with_reference_logprobs(batch)
        logprobs = self.engine.evaluate(rows, self._loss.row_logprobs).cpu()  # (B,)
        pairs = self._loss.pairs(logprobs, rows)
        chosen, rejected = self._loss.rewards(pairs)
        return self._loss.losses(pairs), chosen - rejected
