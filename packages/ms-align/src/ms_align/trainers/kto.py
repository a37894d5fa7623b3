"""KTO and its variants: optimization of responses that are labeled desirable or undesirable."""

from collections.abc import Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from ms_align.engines.protocol import Engine, StepReport
from ms_align.engines.reference import Reference
from ms_align.errors import ConfigError, DataError, NothingToLearnError
from ms_align.losses.kto import KTOLoss, row_logprobs, row_weights
from ms_align.losses.protocol import Batch
from ms_align.losses.unpaired import KTOOptions
from ms_align.run.initial_weights import weights_checksum
from ms_align.run.loop import RunLog
from ms_align.streams.folders import unpaired
from ms_align.streams.protocol import HeldOut, next_batch
from ms_align.streams.text_ends import TextEnds
from ms_align.trainers.base.offline import OfflineLearner, TrainingData
from ms_align.trainers.base.reference import ReferenceTrainer

KL_PREFIX = "kl_"
"""Prefix of the columns with mismatched responses, from which the KL is estimated."""


@frozen(kw_only=True, slots=False)
class KTOTrainer(KTOOptions, ReferenceTrainer):
    """Optimize responses labeled desirable or undesirable.

    `KTOTrainer(model=model, steps=100).train(dataset)` with a dataset of labeled responses or of
    preference pairs, which are unpaired.

    Raises:
        ConfigError: a setting has the wrong type or is out of range.
    """

    algorithm = "kto"

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.baseline == "kl" and self.batch_size < 2:
            raise ConfigError(
                "batch_size must be at least 2 for kto, as its KL is estimated on the responses of "
                "other rows, got 1; raise it, or use loss_type = 'apo_zero_unpaired'"
            )

    def learner(self, engine: Engine, data: TrainingData, ends: TextEnds) -> "KTOLearner":
        """Build the learner of `loss_type`."""
        return KTOLearner(engine, data, ends, self.subset(KTOLoss), self.reference(engine))

    def stream(self, dataset: Any, engine: Engine, **settings: Any) -> Any:
        """Open the stream of responses in a dataset folder."""
        options = {
            "sequence_length": self.sequence_length,
            "batch_size": self.batch_size,
            "mismatched": self.baseline == "kl",
            "seed": self.seed,
            **settings,
        }
        return unpaired(dataset, engine, **options)

    def count_steps(self, dataset: Any, engine: Engine) -> int:
        """Count the updates in `epochs` passes over a folder's responses."""
        responses = int(self.stream(dataset, engine).responses_per_epoch)
        return -(-responses * (self.epochs or 1) // self.batch_size)


class KTOLearner(OfflineLearner):
    """Learns from labeled responses by their log-ratios to the reference."""

    no_targets = (
        "no response of step {step} has target tokens and a weight above 0, so nothing would be "
        "learned; check the data, or raise sequence_length"
    )

    def __init__(
        self,
        engine: Engine,
        data: TrainingData,
        ends: TextEnds,
        loss: KTOLoss,
        reference: Reference,
    ) -> None:
        super().__init__(engine, data, ends)
        self._loss = loss
        self.reference = reference
        self.baseline = 0.0
        """Baseline of the last batch: the KL, or the mean reward of the run."""
        self.rewards = 0.0
        """Total weight of the rewards in the mean."""
        self.identity = {
            "policy": weights_checksum(engine),
            "reference": weights_checksum(reference.engine),
        }

    def loss(self) -> KTOLoss:
        """Return the loss of the next update."""
        return self._loss

    def next_batch(self) -> Mapping[str, Any]:
        """Read the next batch and add `reference_logprobs` and `baseline`, (B,) each."""
        return self._prepare(next_batch(self.data.stream), training=True)

    def observe(self, update: StepReport, log: RunLog) -> Mapping[str, float]:
        """Return the mean reward of desirable and undesirable responses, and the baseline."""
        desirable = update.statistics["desirable"]
        return {
            **_mean_rewards(
                [desirable, 1 - desirable],
                [update.statistics[name] for name in ("reward_chosen", "reward_rejected")],
            ),
            **self._baseline_metric(),
        }

    def held_out_metrics(self, held_out: HeldOut) -> Mapping[str, float]:
        """Return held-out loss, rewards and margin; the mean reward of BCO is left unchanged."""
        totals = torch.zeros(6, dtype=torch.float64)
        for batch in held_out():
            rows = self._prepare(batch, training=False)
            logprobs = self.engine.evaluate(rows, row_logprobs).cpu()
            labeled = self._loss.rows(logprobs, rows)
            local = (row_weights(rows), self._loss.losses(labeled), labeled.log_ratios)
            columns = [self.engine.gather(x).cpu().double() for x in (*local, labeled.signs)]
            weights, losses, log_ratios, signs = columns
            chosen, rejected = weights * (signs > 0), weights * (signs < 0)
            rewards = self._loss.beta * log_ratios
            parts = (weights, weights * losses, chosen, rejected, chosen * rewards)
            totals += torch.stack([part.sum() for part in (*parts, rejected * rewards)])
        weight, loss, chosen_count, rejected_count, *sums = totals.tolist()
        if weight == 0:
            raise NothingToLearnError("the held-out data has no responses; hold out more")
        rewards_by_label = _mean_rewards([chosen_count, rejected_count], sums)
        named = {f"held_out_{name}": value for name, value in rewards_by_label.items()}
        return {"held_out_loss": loss / weight, **named}

    def extra_state(self) -> dict[str, Any]:
        """Return the mean reward of the run."""
        return {"baseline": self.baseline, "rewards": self.rewards}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore the mean reward of the run."""
        self.baseline, self.rewards = float(state["baseline"]), float(state["rewards"])

    def _prepare(self, batch: Mapping[str, Any], *, training: bool) -> dict[str, Tensor]:
        """Split off the mismatched rows and add the columns that the loss reads."""
        columns = {name: torch.as_tensor(value) for name, value in batch.items()}
        mismatched = {
            name.removeprefix(KL_PREFIX): columns.pop(name)
            for name in list(columns)
            if name.startswith(KL_PREFIX)
        }
        if "label" not in columns:
            raise DataError(
                "a batch of labeled responses must have the column `label`, got none; use "
                "ms_data.UnpairedStream"
            )
        columns["reference_logprobs"] = self._reference_logprobs(columns)
        baseline = self.baseline
        if self._loss.baseline == "kl":
            baseline = self._estimate_kl(mismatched)
        elif self._loss.baseline == "reward_mean" and training:
            baseline = self._update_mean_reward(columns)
        if training:
            self.baseline = baseline
        columns["baseline"] = torch.full_like(columns["reference_logprobs"], baseline)
        return columns

    def _reference_logprobs(self, rows: Batch) -> Tensor:
        # Computed once per batch, before the policy changes.
        with self.reference.activate():
            return self.reference.engine.evaluate(rows, row_logprobs).cpu()

    def _log_ratios(self, rows: Batch, reference_logprobs: Tensor) -> Tensor:
        return self.engine.evaluate(rows, row_logprobs).cpu() - reference_logprobs

    def _estimate_kl(self, rows: dict[str, Tensor]) -> float:
        """Average the log-ratios of the global batch's mismatched responses, at least 0."""
        if not rows:
            raise DataError(
                "loss_type = 'kto' needs mismatched responses to estimate the KL, and the stream "
                "has none; open it with mismatched=True, or use another loss_type"
            )
        log_ratios = self._log_ratios(rows, self._reference_logprobs(rows))
        return max(0.0, self._global_mean(log_ratios, row_weights(rows))[0])

    def _update_mean_reward(self, rows: Batch) -> float:
        """Return the running mean of rewards, including the global batch."""
        rewards = self._loss.beta * self._log_ratios(rows, rows["reference_logprobs"])
        mean, weight = self._global_mean(rewards, row_weights(rows))
        if not weight:
            return self.baseline
        self.rewards += weight
        return self.baseline + (mean - self.baseline) * weight / self.rewards

    def _global_mean(self, values: Tensor, weights: Tensor) -> tuple[float, float]:
        """Return the weighted mean over all data ranks, and the sum of the weights."""
        # All ranks sum the same gathered rows in the same order, so they get the same bits.
        values, weights = (self.engine.gather(x).cpu().double() for x in (values, weights))
        total = float(weights.sum())
        return (float((values * weights).sum()) / total if total else 0.0), total

    def _baseline_metric(self) -> dict[str, float]:
        return {} if self._loss.baseline == "none" else {self._loss.baseline: self.baseline}


def _mean_rewards(weights: list[float], sums: list[float]) -> dict[str, float]:
    """Return the mean reward of each label that occurs, and their difference."""
    names = ("reward_chosen", "reward_rejected")
    rewards = {
        name: total / weight
        for name, weight, total in zip(names, weights, sums, strict=True)
        if weight > 0
    }
    if len(rewards) == len(names):
        rewards["margin"] = rewards["reward_chosen"] - rewards["reward_rejected"]
    return rewards
