"""Learns from rollouts: draws and scores responses, and uses each rollout for several updates.

All that it must remember is in its state, so a run that was killed goes on bit for bit.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from attrs import define, field
from torch import Tensor

from ms_align import processes
from ms_align.engines.protocol import Engine, StepReport
from ms_align.engines.reference import Reference
from ms_align.errors import ConfigError, NothingToLearnError
from ms_align.generation.responses import Generator, Responses
from ms_align.losses.protocol import IGNORED
from ms_align.rollouts.algorithm import Algorithm
from ms_align.rollouts.experience import Experience, Scoring, shaped_scores
from ms_align.rollouts.options import RolloutOptions
from ms_align.rollouts.prompts import Prompt, PromptOrder
from ms_align.rollouts.rows import (
    gather_responses,
    gather_rows,
    logprobs_of,
    sequences,
    values_of,
)
from ms_align.run.checkpoint import State
from ms_align.run.loop import RunLog
from ms_align.run.samples import log_sample
from ms_align.seeds import seed_of

SEEDS = 1 << 40
"""Between the seeds of two runs; a rollout takes one of those between."""
HELD_OUT_SEED = SEEDS - 1


@define(kw_only=True, eq=False)
class RolloutLearner:
    """Rollouts, and the updates that each is used for."""

    algorithm: Algorithm
    options: RolloutOptions
    seed: int
    policy: Engine
    value: Engine | None
    """What estimates values: the policy itself, another engine, or nothing."""
    reference: Reference | None
    generator: Generator
    scoring: Scoring
    prompts: Sequence[Prompt]
    held_out: Sequence[Prompt]
    kl_coeff: float = field(init=False)
    rollouts: int = 0
    """How many were made."""
    equal_in_a_row: int = 0
    buffer: dict[str, Tensor] = field(factory=dict)
    """The rollout that is being used, all rows of all data ranks."""
    order: list[list[int]] = field(factory=list)
    """Rows of each update that is still to be made with it."""
    metrics: dict[str, float] = field(factory=dict)
    """What each update logs of the rollout."""

    def __attrs_post_init__(self) -> None:
        self.kl_coeff = self.options.kl_coeff

    def update(self, log: RunLog) -> tuple[StepReport, Mapping[str, float]]:
        """Update the weights once, after a rollout where the last one is used up."""
        if not self.order:
            self._roll_out(log)
        batch = self._minibatch(self.order.pop(0))
        coefficient = self.kl_coeff if self.options.kl_in == "loss" else 0.0
        update = self.policy.step(batch, self.algorithm.loss(coefficient))
        statistics = {**self.metrics, **update.statistics}
        value_loss = self.algorithm.value_loss()
        if value_loss is not None and self.value is not None:
            of_value = self.value.step(batch, value_loss)
            statistics |= {"value_loss": of_value.loss, **of_value.statistics}
        return update, statistics

    def evaluate(self, log: RunLog) -> Mapping[str, float]:
        """Compute the mean reward of one response to each held-out prompt, and log some of them.

        Every process scores all of them, with random numbers that are the same each time.
        """
        if not self.held_out:
            return {}
        # Generation is collective, so every rank writes as many responses; what the padding got is
        # left out of the means.
        rank, ranks = self.policy.data_rank, self.policy.data_ranks
        padded = processes.pad_to_ranks(self.held_out, ranks)
        local = padded[processes.rows_of_rank(len(padded), rank, ranks)]
        responses = self._draw(local, count=1, seed=HELD_OUT_SEED)
        everyone = gather_responses(self.policy, responses)
        scores, samples = self.scoring(padded, everyone)
        count = len(self.held_out)
        metrics = {"reward": _mean(scores.total[:count])}
        if len(scores.parts) > 1:
            metrics |= {name: _mean(part[:count]) for name, part in scores.parts.items()}
        metrics["response_tokens"] = float(everyone.lengths[:count].float().mean())
        metrics["stopped"] = float(everyone.stopped[:count].float().mean())
        left_out = int((~scores.total[:count].isfinite()).sum())
        if left_out:
            metrics["left_out"] = float(left_out)
        for failure in scores.failures:
            log.event("reward_failure", {"rollout": -1, "problem": failure})
        for index in range(min(self.options.evaluate_samples, count)):
            sample = samples[index]
            reward = float(scores.total[index])
            log_sample(log, sample.prompt, sample.response, reward, show=bool(sample.response))
        return metrics

    def state(self) -> State:
        """Return the engines' state, the rollout, and the place in prompts and seeds."""
        tensors = {f"buffer.{name}": value for name, value in self.buffer.items()}
        for prefix, engine in self._engines():
            tensors |= {f"{prefix}.{name}": t for name, t in engine.state_dict().items()}
        facts = {
            "rollouts": self.rollouts,
            "equal_in_a_row": self.equal_in_a_row,
            "kl_coeff": self.kl_coeff,
            "order": self.order,
            "metrics": self.metrics,
        }
        return State(tensors=tensors, facts=facts)

    def load(self, state: State) -> None:
        """Go to where `state` was taken."""
        for prefix, engine in self._engines():
            engine.load_state_dict(_below(state.tensors, prefix))
        self.buffer = _below(state.tensors, "buffer")
        facts = state.facts
        self.rollouts, self.order = facts["rollouts"], facts["order"]
        self.equal_in_a_row, self.kl_coeff = facts["equal_in_a_row"], facts["kl_coeff"]
        self.metrics = facts["metrics"]

    def _engines(self) -> list[tuple[str, Engine]]:
        own_value = self.value is not None and self.value is not self.policy
        return [
            ("policy", self.policy),
            *([("value", self.value)] if own_value and self.value else []),
        ]

    def _minibatch(self, rows: list[int]) -> dict[str, Tensor]:
        """Return this data rank's rows of an update."""
        mine = rows[self.policy.data_rank :: self.policy.data_ranks]
        return {name: value[mine] for name, value in self.buffer.items()}

    def _roll_out(self, log: RunLog) -> None:
        """Draw, judge and prepare responses, and decide in which order they are used."""
        options = self.options
        count = options.batch_size // options.group_size
        order = PromptOrder(count=len(self.prompts), seed=self.seed)
        chosen = [self.prompts[index] for index in order.take(self.rollouts * count, count)]
        seed = seed_of(self.seed, self.rollouts, apart=SEEDS)
        rank, ranks = self.policy.data_rank, self.policy.data_ranks
        mine = chosen[processes.rows_of_rank(count, rank, ranks)]
        responses = self._draw(mine, count=options.group_size, seed=seed)
        rows = self._prepare(mine, responses, max(len(prompt.tokens) for prompt in chosen))
        everyone = gather_responses(self.policy, responses)
        repeated = [prompt for prompt in chosen for _ in range(options.group_size)]
        scores, samples = self.scoring(repeated, everyone)
        shaped = shaped_scores(
            scores.total,
            everyone,
            missing_stop_penalty=options.missing_stop_penalty,
            length_penalty=options.length_penalty,
            clip=options.reward_clip,
        )
        left_out = ~shaped.isfinite()
        rows["targets"] = rows["targets"].masked_fill(left_out[:, None], IGNORED)
        experience = Experience(
            targets=rows["targets"],
            old_logprobs=rows["old_logprobs"],
            reference_logprobs=rows.get("reference_logprobs"),
            values=rows.get("old_values"),
            scores=shaped,
        )
        self._check(experience, log)
        coefficient = self.kl_coeff if options.kl_in == "reward" else 0.0
        self.buffer = {**rows, **self.algorithm.advantages(experience, coefficient)}
        self._order_rows(experience)
        self._log_rollout(experience, everyone, scores.total, scores.parts, log)
        for failure in scores.failures:
            log.event("reward_failure", {"rollout": self.rollouts, "problem": failure})
        index = self.rollouts % len(samples)
        sample, reward = samples[index], float(scores.total[index])
        log_sample(log, sample.prompt, sample.response, reward, show=False)
        if options.controller is not None:
            self.kl_coeff = options.controller.next(
                self.kl_coeff, self.metrics["kl"], options.batch_size
            )
        self.rollouts += 1

    def _draw(self, prompts: Sequence[Prompt], *, count: int, seed: int) -> Responses:
        tokens = [prompt.tokens for prompt in prompts]
        return self.generator(tokens, self.options.sampling, count=count, seed=seed)

    def _prepare(
        self, prompts: Sequence[Prompt], responses: Responses, longest: int
    ) -> dict[str, Tensor]:
        """Build the responses' rows, ask the models about them, and gather all data ranks'."""
        options = self.options
        repeated = [prompt.tokens for prompt in prompts for _ in range(options.group_size)]
        # Data ranks must agree on a width, and know only their own responses.
        width = longest + options.max_new_tokens if self.policy.data_ranks > 1 else None
        rows = sequences(repeated, responses, longest=width, parts=self.policy.row_parts)
        temperature = options.sampling.policy_temperature
        if "old_logprobs" not in rows or options.recompute_logprobs:
            rows["old_logprobs"] = logprobs_of(self.policy, rows, temperature)
        if self.reference is not None:
            with self.reference.while_asked():
                rows["reference_logprobs"] = logprobs_of(self.reference.engine, rows, temperature)
        if self.value is not None:
            rows["old_values"] = values_of(self.value, rows)
        return gather_rows(self.policy, rows)

    def _check(self, experience: Experience, log: RunLog) -> None:
        """Refuse a rollout of which nothing can be learned."""
        if not experience.mask.any():
            raise NothingToLearnError(
                f"rollout {self.rollouts}: no response token is left to learn from; look at the "
                "rewards that failed, or at max_new_tokens"
            )
        if not self.algorithm.learns_from_groups:
            return
        kept = experience.kept
        groups = experience.scores.view(-1, self.options.group_size)
        left_out = ~kept.view(groups.shape)
        highest = groups.masked_fill(left_out, -torch.inf).amax(1)
        lowest = groups.masked_fill(left_out, torch.inf).amin(1)
        self.equal_in_a_row = 0 if bool((highest > lowest).any()) else self.equal_in_a_row + 1
        if self.equal_in_a_row:
            log.event("equal_rewards", {"rollout": self.rollouts, "in_a_row": self.equal_in_a_row})
        if self.equal_in_a_row >= self.options.equal_rewards_limit:
            last = float(experience.scores[kept][0])
            raise NothingToLearnError(
                f"in {self.equal_in_a_row} rollouts in a row all responses to a prompt had the "
                f"same reward (the last {last:g}), so nothing was learned; "
                "give prompts of another difficulty, a reward with more shades, a higher "
                "temperature, or a greater group_size"
            )

    def _order_rows(self, experience: Experience) -> None:
        """Choose the rows of each update: each epoch in its own order, like lengths together."""
        size = self.options.minibatch_size or self.options.batch_size
        if size % self.policy.data_ranks:
            raise ConfigError(
                f"minibatch_size {size} does not divide over {self.policy.data_ranks} data ranks"
            )
        mask = experience.mask
        ends = torch.where(mask, torch.arange(mask.shape[1]), 0).amax(1).tolist()
        seed = seed_of(self.seed, self.rollouts, apart=SEEDS)
        generator = torch.Generator().manual_seed(seed)
        self.order = []
        for _ in range(self.options.epochs):
            rows = torch.randperm(len(ends), generator=generator).tolist()
            for start in range(0, len(rows), size):
                self.order.append(sorted(rows[start : start + size], key=lambda row: ends[row]))

    def _log_rollout(
        self,
        experience: Experience,
        responses: Responses,
        scores: Tensor,
        parts: Mapping[str, Tensor],
        log: RunLog,
    ) -> None:
        kept = experience.kept
        divergence = experience.divergence().sum(1)
        self.metrics = {"reward": _mean(scores), "kl": _mean(divergence[kept])}
        fields: dict[str, int | float | str] = {
            "rollout": self.rollouts,
            **self.metrics,
            "shaped_reward": _mean(experience.scores),
            "reward_std": float(scores[kept].std(correction=0)),
            "kl_coeff": self.kl_coeff,
            "response_tokens": float(responses.lengths.float().mean()),
            "stopped": float(responses.stopped.float().mean()),
            "truncated": int((~responses.stopped).sum()),
            "left_out": int((~kept).sum()),
        }
        if len(parts) > 1:
            fields |= {f"reward.{name}": _mean(part) for name, part in parts.items()}
        log.event("rollout", fields)


def _mean(values: Tensor) -> float:
    kept = values[values.isfinite()]
    return float(kept.mean()) if len(kept) else math.nan


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    start = f"{prefix}."
    return {name[len(start) :]: t for name, t in tensors.items() if name.startswith(start)}
