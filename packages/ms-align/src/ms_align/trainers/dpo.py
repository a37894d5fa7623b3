"""DPO: prefer the chosen answers, measured against a reference."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor

from ms_align.engines.protocol import Engine
from ms_align.engines.reference import ADAPTER_OFF, Reference, reference_of
from ms_align.losses.dpo import DPOLoss, DPOOptions, dpo_loss, row_logprobs
from ms_align.run.initial_weights import weights_checksum
from ms_align.settings import a_path
from ms_align.streams.protocol import next_batch
from ms_align.streams.text_ends import TextEnds
from ms_align.trainers.frame.offline import TrainingData
from ms_align.trainers.frame.pairs import PairLearner, PairTrainer


@frozen(kw_only=True, slots=False)
class DPOTrainer(DPOOptions, PairTrainer):
    """Optimise preferences directly, without a reward model.

    `DPOTrainer(model=model, steps=100).train(dataset)`; every setting is a keyword, and nothing
    starts before `train`.

    Raises:
        ConfigError: a setting is of the wrong kind or out of range.
    """

    algorithm = "dpo"

    reference_model: Any = field(default=None, validator=a_path(optional=True, objects=True))
    """The reference, a folder, and in Python a module or an Engine; by default the model as it
    begins, which is the model without its adapters where it has some."""

    def learner(self, engine: Engine, data: TrainingData, ends: TextEnds) -> "DPOLearner":
        """Build what learns from the pairs."""
        return DPOLearner(engine, data, ends, self.part(DPOLoss), self._reference(engine))

    def _reference(self, engine: Engine) -> Reference | None:
        if self.reference_free:
            return None
        given = self.reference_model
        if given is None and engine.adapters is not None:
            given = ADAPTER_OFF
        if given is None and self.layout is not None:
            given = self.model  # a split model is not copied but read once more
        return reference_of(given, engine, partial(self.start_engine, trained=False))


class DPOLearner(PairLearner):
    """Learns from pairs by their log-ratios to the reference."""

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
        """Return the mean DPO loss."""
        return self._loss

    def next_batch(self) -> Mapping[str, Any]:
        """Take the next batch, with `reference_logprobs` (B,)."""
        return self._referenced(next_batch(self.data.stream))

    def _referenced(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.reference is None:
            return batch
        rows = {name: torch.as_tensor(value) for name, value in batch.items()}
        with self.reference.while_asked():
            found = self.reference.engine.evaluate(rows, row_logprobs)
        return {**rows, "reference_logprobs": found.cpu()}

    def judge(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Compute DPO's loss, and the implicit reward's margin."""
        rows = self._referenced(batch)
        own = self.engine.evaluate(rows, row_logprobs).cpu().view(-1, 2)
        reference = torch.zeros_like(own)
        if self.reference is not None:
            reference = rows["reference_logprobs"].view(-1, 2)
        beta, smoothing = self._loss.beta, self._loss.label_smoothing
        losses = dpo_loss(*own.T, *reference.T, beta=beta, label_smoothing=smoothing)
        rewards = beta * (own - reference)
        return losses, rewards[:, 0] - rewards[:, 1]
