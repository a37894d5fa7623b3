"""Learner of the online trainers: generate and score rollouts, use each for several updates.

Its state is complete, so a run that is killed resumes bit for bit.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from time import monotonic
from typing import Literal

import torch
from attrs import define, field
from torch import Tensor

from ms_align import processes
from ms_align.engines.protocol import Engine, StepReport
from ms_align.engines.reference import Reference
from ms_align.errors import ConfigError, NothingToLearnError, ServerError
from ms_align.generation.responses import Episode, Responses, RolloutEngine, Span, TimedResponses
from ms_align.losses.protocol import IGNORED
from ms_align.rollouts.algorithm import Algorithm, EpisodeGenerator
from ms_align.rollouts.correction import correct
from ms_align.rollouts.experience import Experience, RewardScorer, shaped_scores
from ms_align.rollouts.options import RolloutOptions
from ms_align.rollouts.prompts import Prompt, PromptOrder
from ms_align.rollouts.rollout import Rollout
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

SEED_STRIDE = 1 << 40
"""Distance between the rollout seeds of consecutive run seeds; one seed per rollout."""
HELD_OUT_SEED = SEED_STRIDE - 1


@define(eq=False)
class PendingRollout:
    """Rollout in generation, or generated but not used yet."""

    prompt_batch: int
    """Index of the rollout's batch of prompts."""
    wait: Callable[[], TimedResponses]
    """Waits for this data rank's responses. Collective."""
    _timed: TimedResponses | None = field(default=None, init=False)

    def result(self) -> TimedResponses:
        """Wait for this data rank's responses and return them. Collective."""
        if self._timed is None:
            self._timed = self.wait()
        return self._timed


@define(kw_only=True, eq=False)
class RolloutLearner:
    """Generates rollouts and updates the policy and any value model."""

    algorithm: Algorithm
    options: RolloutOptions
    seed: int
    policy: Engine
    value: Engine | None
    """Engine with the value head: the policy, a separate engine, or None."""
    reference: Reference | None
    engine: RolloutEngine
    episodes: EpisodeGenerator | None = None
    """Runs episodes with tools or an environment; None for responses of one turn."""
    scoring: RewardScorer
    prompts: Sequence[Prompt]
    held_out: Sequence[Prompt]
    kl_coeff: float = field(init=False)
    rollouts: int = 0
    """Number of rollouts so far."""
    prompt_batches: int = 0
    """Batches of prompts whose generation has started."""
    pending: deque[PendingRollout] = field(factory=deque)
    """Rollouts after the current one whose generation has started, in order."""
    equal_in_a_row: int = 0
    buffer: dict[str, Tensor] = field(factory=dict)
    """Current rollout: rows of all data ranks, by column."""
    minibatches: list[list[int]] = field(factory=list)
    """Rows of the remaining updates of this rollout."""
    metrics: dict[str, float] = field(factory=dict)
    """Rollout metrics, logged with each of its updates."""
    generation_ended_s: float | None = None
    """Time of the monotonic clock at which the newest rollout used so far was generated."""
    waits: dict[str, float] = field(factory=dict)
    """Seconds that learner and generator waited before this update."""
    spans: list[Span] = field(factory=list)
    """Times of generators, rewards, updates and weight updates that are not logged yet."""

    def __attrs_post_init__(self) -> None:
        self.kl_coeff = self.options.kl_coeff

    @property
    def version(self) -> int:
        """Version of the policy's weights: the number of updates so far."""
        return self.rollouts * self.updates_per_rollout - len(self.minibatches)

    @property
    def updates_per_rollout(self) -> int:
        """Number of updates for which each rollout is used."""
        options = self.options
        size = options.minibatch_size or options.batch_size
        return options.epochs * (options.batch_size // size)

    def update(self, log: RunLog) -> tuple[StepReport, Mapping[str, float]]:
        """Update the weights once; collect a new rollout first if the current one is used up."""
        self.waits = {"learner_wait_s": 0.0, "generator_wait_s": 0.0}
        self._run_ahead()
        if not self.minibatches:
            self._collect_rollout(log)
        ledger = {**self._staleness(self.minibatches[0]), **self.waits}
        batch = self._minibatch(self.minibatches.pop(0))
        # The KL penalty is in the rewards or in the loss, never in both.
        coefficient = self.kl_coeff if self.options.kl_in == "loss" else 0.0
        with self._timed("learn"):
            update = self.policy.step(batch, self.algorithm.loss(coefficient))
            statistics = {**self.metrics, **update.statistics}
            value_loss = self.algorithm.value_loss()
            if value_loss is not None and self.value is not None:
                batch.pop("routed_experts", None)  # a separate value model has its own routers
                value_update = self.value.step(batch, value_loss)
                statistics |= {"value_loss": value_update.loss, **value_update.statistics}
        self._log_spans(log)
        return update, statistics | ledger

    def evaluate(self, log: RunLog) -> Mapping[str, float]:
        """Return the mean reward over the held-out prompts, one response each; log a few samples.

        All ranks score all responses. The sampling seed is fixed, so evaluating the same weights
        twice gives the same metrics.
        """
        if not self.held_out:
            return {}
        # Generation is collective, so every rank generates the same number of responses. The
        # padding repeats prompts and is dropped from the means.
        padded = processes.pad_to_ranks(self.held_out, self.policy.data_ranks)
        self.engine.update_weights(self.version)
        sampling = self.options.sampling
        if self.episodes is not None:
            all_responses = self.episodes(
                self.engine, padded, sampling, count=1, seed=HELD_OUT_SEED
            )
        else:
            tokens = [prompt.tokens for prompt in self._local(padded)]
            responses = self.engine.generate(tokens, sampling, count=1, seed=HELD_OUT_SEED)
            all_responses = gather_responses(self.policy, responses)
        scores, samples = self.scoring(padded, all_responses)
        count = len(self.held_out)
        metrics = {"reward": _mean(scores.total[:count])}
        if len(scores.parts) > 1:
            metrics |= {name: _mean(part[:count]) for name, part in scores.parts.items()}
        metrics["response_tokens"] = float(all_responses.sampled_lengths[:count].float().mean())
        metrics["stopped"] = float(all_responses.stopped[:count].float().mean())
        skipped = int((~scores.total[:count].isfinite()).sum())
        if skipped:
            metrics["left_out"] = float(skipped)
        for failure in scores.failures:
            log.event("reward_failure", {"rollout": -1, "problem": failure})
        for index in range(min(self.options.eval_samples, count)):
            sample = samples[index]
            reward = float(scores.total[index])
            log_sample(log, sample.prompt, sample.response, reward, show=bool(sample.response))
        return metrics

    def state(self) -> State:
        """Return engine states, the current and pending rollouts, and the counters. Collective.

        Waits for pending rollouts: a resumed run no longer has the weights to generate them.
        """
        # The prompts of a pending rollout follow from its batch index, so only responses are saved.
        tensors = {f"buffer.{name}": value for name, value in self.buffer.items()}
        for index, pending in enumerate(self.pending):
            columns = pending.result().responses.columns
            tensors |= {f"pending.{index}.{name}": value for name, value in columns.items()}
        for prefix, engine in self._engines():
            tensors |= {f"{prefix}.{name}": t for name, t in engine.state_dict().items()}
        facts = {
            "rollouts": self.rollouts,
            "prompt_batches": self.prompt_batches,
            "pending": [pending.prompt_batch for pending in self.pending],
            "equal_in_a_row": self.equal_in_a_row,
            "kl_coeff": self.kl_coeff,
            "order": self.minibatches,
            "metrics": self.metrics,
        }
        return State(tensors=tensors, facts=facts)

    def load(self, state: State) -> None:
        """Restore a state."""
        for prefix, engine in self._engines():
            engine.load_state_dict(_with_prefix(state.tensors, prefix))
        self.buffer = _with_prefix(state.tensors, "buffer")
        facts = state.facts
        self.pending.clear()
        for index, prompt_batch in enumerate(facts["pending"]):
            responses = Responses.of(_with_prefix(state.tensors, f"pending.{index}"))
            # Times of another process's monotonic clock mean nothing here.
            timed = TimedResponses(responses=responses, began_s=0.0, ended_s=0.0)
            self.pending.append(PendingRollout(prompt_batch, partial(_return, timed)))
        self.rollouts, self.minibatches = facts["rollouts"], facts["order"]
        self.prompt_batches = facts["prompt_batches"]
        self.equal_in_a_row, self.kl_coeff = facts["equal_in_a_row"], facts["kl_coeff"]
        self.metrics = facts["metrics"]

    def _engines(self) -> list[tuple[str, Engine]]:
        # A value head on the policy is part of the policy's state.
        separate_value = self.value is not None and self.value is not self.policy
        return [
            ("policy", self.policy),
            *([("value", self.value)] if separate_value and self.value else []),
        ]

    def _minibatch(self, rows: list[int]) -> dict[str, Tensor]:
        """Return this data rank's rows of a minibatch."""
        # strided: ranks get equal numbers of rows
        local = rows[self.policy.data_rank :: self.policy.data_ranks]
        # Versions are for the ledger; the loss does not use them.
        columns = {name: value for name, value in self.buffer.items() if name != "versions"}
        return {name: value[local] for name, value in columns.items()}

    def _collect_rollout(self, log: RunLog) -> None:
        """Generate, score and prepare responses, and split them into minibatches."""
        options = self.options
        # In rollout order, which is also the order of generation.
        pending = self.pending.popleft() if self.pending else self._start_rollout()
        rollout, resampled = self._resample(self._draw_rollout(pending))
        rows, all_responses = dict(rollout.rows), rollout.responses
        sampling_logprobs = rows.pop("sampling_logprobs", None)
        self._check_sampler(rows, sampling_logprobs)
        scores, samples, shaped = rollout.scores, rollout.samples, rollout.shaped
        skipped = ~shaped.isfinite()  # (N,)
        # A response without a valid reward is masked out entirely.
        rows["targets"] = rows["targets"].masked_fill(skipped[:, None], IGNORED)
        experience = Experience(
            targets=rows["targets"],
            old_logprobs=rows["old_logprobs"],
            reference_logprobs=rows.get("reference_logprobs"),
            values=rows.get("old_values"),
            scores=shaped,
        )
        for failure in scores.failures:
            log.event("reward_failure", {"rollout": self.rollouts, "problem": failure})
        can_learn = bool(rollout.informative_groups(options.num_generations).any())
        self._check_rollout(experience, can_learn, log)
        # Otherwise the loss has the KL term, and rewards are left alone.
        coefficient = self.kl_coeff if options.kl_in == "reward" else 0.0
        self.buffer = {**rows, **self.algorithm.advantages(experience, coefficient)}
        sampler_metrics: Mapping[str, float] = {}
        if sampling_logprobs is not None:
            correction = correct(
                rows["old_logprobs"],
                sampling_logprobs,
                experience.mask,
                self.buffer["advantages"],
                options,
            )
            # Weights are not negative, so scaling the advantage scales each token's policy loss.
            # The value loss and the KL term are not weighted, as in TRL.
            self.buffer["advantages"] = self.buffer["advantages"] * correction.weights
            # In bypass mode these are the sampler's log-probabilities: the loss then clips π/μ.
            self.buffer["old_logprobs"] = correction.old_logprobs
            sampler_metrics = correction.metrics
        self._log_rollout(
            experience, all_responses, scores.total, scores.parts, sampler_metrics, resampled, log
        )
        self._split_minibatches(experience)
        # One sample per rollout is logged, a different one each time.
        index = self.rollouts % len(samples)
        sample, reward = samples[index], float(scores.total[index])
        log_sample(log, sample.prompt, sample.response, reward, show=False)
        if options.controller is not None:
            # Takes effect in the next rollout; this one's advantages are already computed.
            self.kl_coeff = options.controller.next(
                self.kl_coeff, self.metrics["kl"], options.batch_size
            )
        self._log_spans(log)
        self.rollouts += 1

    @contextmanager
    def _timed(self, kind: Literal["reward", "learn", "update_weights"]) -> Iterator[None]:
        """Add the time of a `with` block to the spans."""
        began_s = monotonic()
        yield
        self.spans.append(Span(kind=kind, began_s=began_s, ended_s=monotonic()))

    def _log_spans(self, log: RunLog) -> None:
        """Log the collected spans, which may have ended earlier than now."""
        for span in self.spans:
            fields: dict[str, int | float | str] = {
                "seconds": round(span.ended_s - span.began_s, 6),
                "ended_ago_s": round(monotonic() - span.ended_s, 6),
            }
            if span.generator is not None:
                fields["generator"] = span.generator
            log.event(span.kind, fields)
        self.spans.clear()

    def _run_ahead(self) -> None:
        """Start the rollouts that may be generated with the current weights.

        With u updates per rollout, rollout r is first used in update r·u and starts `max_staleness`
        updates earlier, but not before the initial weights. So the weight versions of its tokens
        do not depend on timing.
        """
        ahead = self.options.max_staleness
        if not ahead:  # started when it is needed, with the newest weights
            return
        while (
            self.rollouts + len(self.pending)
        ) * self.updates_per_rollout - ahead <= self.version:
            self.pending.append(self._start_rollout())

    def _start_rollout(self) -> PendingRollout:
        """Start generating responses to the next batch of prompts."""
        began_s, options = monotonic(), self.options
        prompts = self._prompt_batch(self.prompt_batches)
        # Seeded by the batch, not the rollout, as resampling uses several batches per rollout.
        seed = seed_of(self.seed, self.prompt_batches, stride=SEED_STRIDE)
        self.prompt_batches += 1
        # Does nothing if the engine already has this version.
        with self._timed("update_weights"):
            self.engine.update_weights(self.version)
        wait: Callable[[], TimedResponses]
        if self.episodes is not None:
            generate = partial(self.episodes, self.engine, prompts, options.sampling)
            episodes = partial(generate, count=options.num_generations, seed=seed)
            # Episodes run here and now: tools need the main process, and cannot run ahead.
            wait = partial(_return, TimedResponses.measure(episodes))
        else:
            # Each data rank generates for its local prompts; scoring sees the prompts of all ranks.
            wait = self.engine.start(
                [prompt.tokens for prompt in self._local(prompts)],
                options.sampling,
                count=options.num_generations,
                seed=seed,
            )
        self.waits["learner_wait_s"] += monotonic() - began_s
        return PendingRollout(self.prompt_batches - 1, wait)

    def _prompt_batch(self, index: int) -> list[Prompt]:
        """Return a batch of prompts, for all data ranks."""
        count = self.options.batch_size // self.options.num_generations
        # The order is a function of seed and position, so that a resumed run needs no state for it.
        order = PromptOrder(count=len(self.prompts), seed=self.seed)
        return [self.prompts[index] for index in order.take(index * count, count)]

    def _local(self, prompts: list[Prompt]) -> list[Prompt]:
        """Return this data rank's prompts."""
        rank, ranks = self.policy.data_rank, self.policy.data_ranks
        return prompts[processes.rows_of_rank(len(prompts), rank, ranks)]

    def _wait_for(self, rollout: PendingRollout) -> Responses:
        """Wait for the responses of a rollout, and add up the wait times."""
        began_s = monotonic()
        timed = rollout.result()
        self.waits["learner_wait_s"] += monotonic() - began_s
        if self.generation_ended_s is not None:
            # The generator was idle from the end of the previous rollout to the start of this one.
            idle = max(0.0, timed.began_s - self.generation_ended_s)
            self.waits["generator_wait_s"] += idle
        self.generation_ended_s = timed.ended_s
        self.spans += timed.spans
        return timed.responses

    def _draw_rollout(self, pending: PendingRollout) -> Rollout:
        """Wait for the responses of a rollout, and score them."""
        options = self.options
        prompts = self._prompt_batch(pending.prompt_batch)
        responses, all_responses = self._gather(self._wait_for(pending))
        # (N,) = prompts x num_generations, like the responses
        repeated = [prompt for prompt in prompts for _ in range(options.num_generations)]
        with self._timed("reward"):
            scores, samples = self.scoring(repeated, all_responses)
        # old and reference log-probs, values
        rows = self._prepare([sample.prompt_tokens for sample in samples], responses)
        # Every rank has the scores of all ranks, so group statistics need no further communication.
        shaped = shaped_scores(
            scores.total,
            all_responses,
            missing_eos_penalty=options.missing_eos_penalty,
            length_penalty=options.length_penalty,
            overlong=(options.max_response_tokens, options.soft_punish_cache),
            clip=options.reward_clip,
        )
        return Rollout(
            rows=rows, responses=all_responses, scores=scores, samples=samples, shaped=shaped
        )

    def _resample(self, rollout: Rollout) -> tuple[Rollout, dict[str, float]]:
        """Replace groups with equal rewards by groups of new prompts, as in DAPO.

        Returns:
            The rollout, and counts of generated and replaced groups; no counts if disabled.
        """
        limit, size = self.algorithm.max_resample_times, self.options.num_generations
        if not limit:
            return rollout, {}
        groups = len(rollout.shaped) // size
        times, rewards = 0, [rollout.shaped.new_empty(0)]
        while times < limit and not rollout.informative_groups(size).all():
            times += 1
            # A full batch of new prompts; `refill` uses its informative groups.
            extra = self._draw_rollout(self._start_rollout())
            refilled, replaced = rollout.refill(extra, size)
            rewards.append(rollout.scores.total[replaced])
            rollout = refilled
        replaced_rewards = torch.cat(rewards)
        counts = {
            "resample_times": float(times),
            "generated_groups": float(groups * (1 + times)),
            "replaced_groups": float(len(replaced_rewards) // size),
            "equal_groups": float((~rollout.informative_groups(size)).sum()),
        }
        if len(replaced_rewards):
            # Near the highest reward, replaced prompts were too easy; near the lowest, too hard.
            counts["replaced_reward"] = _mean(replaced_rewards)
        return rollout, counts

    def _gather(self, responses: Responses) -> tuple[Responses, Responses]:
        """Return this data rank's responses, and all data ranks' responses. Collective."""
        if responses.episodes is None:
            return responses, gather_responses(self.policy, responses)
        # An episode runner already returns the responses of all data ranks.
        rank, ranks = self.policy.data_rank, self.policy.data_ranks
        local = processes.rows_of_rank(len(responses.lengths), rank, ranks)
        return responses.select(local), responses

    def _prepare(
        self, all_prompts: Sequence[Sequence[int]], responses: Responses
    ) -> dict[str, Tensor]:
        """Build padded rows, add log-probabilities and values, and gather all data ranks.

        Args:
            all_prompts: prompt tokens of the responses of all data ranks.
            responses: this data rank's responses.
        """
        options = self.options
        rank, ranks = self.policy.data_rank, self.policy.data_ranks
        local = all_prompts[processes.rows_of_rank(len(all_prompts), rank, ranks)]
        # Data ranks must agree on the width, but each sees only its local responses.
        longest = max(map(len, all_prompts)) + responses.tokens.shape[1]
        width = longest if ranks > 1 else None
        rows = sequences(local, responses, min_tokens=width, parts=self.policy.row_parts)
        temperature = options.sampling.policy_temperature
        if options.max_staleness and "old_logprobs" in rows:
            # These come from the earlier weights that sampled the tokens.
            rows["sampling_logprobs"] = rows.pop("old_logprobs")
        elif options.sampling.truncates:
            # With top-k, top-p or min-p, a server renormalizes over the remaining tokens, so its
            # log-probabilities cannot be compared with the policy's.
            rows.pop("sampling_logprobs", None)
        # Log-probabilities of the generator may differ by rounding from the training forward pass.
        if "old_logprobs" not in rows or options.recompute_logprobs:
            rows["old_logprobs"] = logprobs_of(self.policy, rows, temperature)
        # Separate reference and value models have their own routers.
        shared = {name: value for name, value in rows.items() if name != "routed_experts"}
        if self.reference is not None:
            with self.reference.activate():
                rows["reference_logprobs"] = logprobs_of(self.reference.engine, shared, temperature)
        if self.value is not None:
            rows["old_values"] = values_of(
                self.value, rows if self.value is self.policy else shared
            )
        return gather_rows(self.policy, rows)

    def _check_sampler(self, rows: Mapping[str, Tensor], sampling_logprobs: Tensor | None) -> None:
        """Check with tokens sampled from the current weights that the sampler has this model."""
        if sampling_logprobs is None:
            return
        current = rows["targets"] != IGNORED  # (N, S)
        if self.options.max_staleness:
            current = current & (rows["versions"] == self.version)
        if not current.any():
            return
        difference = float((rows["old_logprobs"] - sampling_logprobs)[current].abs().mean())
        limit = self.options.max_logprob_difference
        if not difference <= limit:  # NaN fails too
            raise ServerError(
                f"rollout {self.rollouts}: log-probabilities of the rollout engine must be within "
                f"max_logprob_difference = {limit:g} of the policy's, and they differ by "
                f"{difference:.3g} per token; check that its servers run the policy's model with "
                "--logprobs-mode processed_logprobs"
            )

    def _staleness(self, rows: list[int]) -> dict[str, float]:
        """Return the mean staleness of a minibatch's tokens, and its histogram as fractions.

        The staleness of a token is the number of updates since its weights.
        """
        mask = self.buffer["targets"][rows] != IGNORED
        if "versions" not in self.buffer or not mask.any():
            return {}
        ages = self.version - self.buffer["versions"][rows][mask]  # (response tokens,)
        shares = (ages.bincount() / len(ages)).tolist()
        histogram = {f"staleness.{age}": share for age, share in enumerate(shares) if share}
        return {"staleness": float(ages.float().mean()), **histogram}

    def _check_rollout(self, experience: Experience, can_learn: bool, log: RunLog) -> None:
        """Check that a rollout has response tokens and, for group baselines, unequal rewards."""
        if not experience.mask.any():
            raise NothingToLearnError(
                f"rollout {self.rollouts}: no response token is left to learn from; check the "
                "rewards that failed, or raise max_new_tokens"
            )
        if not self.algorithm.learns_from_groups:
            return
        valid = experience.valid
        self.equal_in_a_row = 0 if can_learn else self.equal_in_a_row + 1
        if self.equal_in_a_row:
            log.event("equal_rewards", {"rollout": self.rollouts, "in_a_row": self.equal_in_a_row})
        if self.equal_in_a_row >= self.options.equal_rewards_limit:
            last = float(experience.scores[valid][0])
            raise NothingToLearnError(
                f"the rewards of each group were equal in {self.equal_in_a_row} rollouts in a row "
                f"(last reward: {last:g}), so nothing was learned; use prompts of another "
                "difficulty, a finer-grained reward, a higher temperature, or more num_generations"
            )

    def _split_minibatches(self, experience: Experience) -> None:
        """Split the rows into minibatches in a new random order per epoch, sorted by length."""
        size = self.options.minibatch_size or self.options.batch_size
        if size % self.policy.data_ranks:
            raise ConfigError(
                f"minibatch_size {size} must be divisible by the {self.policy.data_ranks} data "
                "ranks; change it"
            )
        mask = experience.mask
        # Position of the last response token, as the length of the row.
        ends = torch.where(mask, torch.arange(mask.shape[1]), 0).amax(1).tolist()
        seed = seed_of(self.seed, self.rollouts, stride=SEED_STRIDE)
        generator = torch.Generator().manual_seed(seed)
        self.minibatches = []
        for _ in range(self.options.epochs):
            # All ranks draw the same order, and then take their rows of each minibatch.
            rows = torch.randperm(len(ends), generator=generator).tolist()
            for start in range(0, len(rows), size):
                # Rows of similar length end up in one microbatch, which saves padding.
                self.minibatches.append(
                    sorted(rows[start : start + size], key=lambda row: ends[row])
                )

    def _log_rollout(
        self,
        experience: Experience,
        responses: Responses,
        scores: Tensor,
        parts: Mapping[str, Tensor],
        sampler_metrics: Mapping[str, float],
        resampled: Mapping[str, float],
        log: RunLog,
    ) -> None:
        valid = experience.valid
        divergence = experience.divergence().sum(1)  # KL per response, (N,)
        self.metrics = {
            "reward": _mean(scores),
            "kl": _mean(divergence[valid]),
            **sampler_metrics,
        }
        fields: dict[str, int | float | str] = {
            "rollout": self.rollouts,
            "weight_version": self.version,
            **self.metrics,
            "queue_depth": len(self.pending),
            "shaped_reward": _mean(experience.scores),
            "reward_std": float(scores[valid].std(correction=0)),
            "kl_coeff": self.kl_coeff,
            "response_tokens": float(responses.sampled_lengths.float().mean()),
            "stopped": float(responses.stopped.float().mean()),
            "truncated": int((~responses.stopped).sum()),
            "left_out": int((~valid).sum()),
            **resampled,
            **_episode_metrics(responses.episodes),
        }
        if len(parts) > 1:
            fields |= {f"reward.{name}": _mean(part) for name, part in parts.items()}
        log.event("rollout", fields)


def _return(timed: TimedResponses) -> TimedResponses:
    """Return responses that are already available."""
    return timed


def _episode_metrics(episodes: Sequence[Episode] | None) -> dict[str, float]:
    """Return the mean numbers of turns and tool calls per episode, and counts of failures."""
    if episodes is None:
        return {}
    count = max(len(episodes), 1)
    return {
        "turns": sum(episode.turns for episode in episodes) / count,
        "tool_calls": sum(episode.calls for episode in episodes) / count,
        "tool_failures": sum(episode.call_failures for episode in episodes),
        "rewritten_turns": sum(episode.rewritten for episode in episodes),
        "forks": sum(episode.forks for episode in episodes),
        "failed_episodes": sum(bool(episode.failure) for episode in episodes),
    }


def _mean(values: Tensor) -> float:
    finite = values[values.isfinite()]
    return float(finite.mean()) if len(finite) else math.nan


def _with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Select the tensors below a prefix and strip it from their names."""
    start = f"{prefix}."
    return {name[len(start) :]: t for name, t in tensors.items() if name.startswith(start)}
