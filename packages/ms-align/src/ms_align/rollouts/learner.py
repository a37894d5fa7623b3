"""One update of a trainer that learns from its own responses, and all that it must remember."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from ms_align.engines.protocol import Engine, Update
from ms_align.engines.reference import Reference
from ms_align.errors import ConfigError, NothingToLearnError
from ms_align.generation.responses import Generator, Responses
from ms_align.losses.protocol import IGNORED
from ms_align.rewards.scoring import Sample
from ms_align.rollouts.experience import Experience, Scoring, shaped_scores
from ms_align.rollouts.prompts import Prompt, PromptOrder
from ms_align.rollouts.rows import gather_rows, logprobs_of, sequences, values_of
from ms_align.run.checkpoint import State
from ms_align.run.loop import Tell
from ms_align.seeds import seed_of

if TYPE_CHECKING:
    from ms_align.trainers.frame.online import OnlineTrainer

__all__ = ["OnlineWork"]

SEEDS = 1 << 40
"""Between the seeds of two runs; a rollout takes one of those between."""
HELD_OUT_SEED = SEEDS - 1


@frozen(kw_only=True)
class _Told:
    """An update with a rollout's figures beside its own."""

    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    skipped: bool
    statistics: Mapping[str, float]


@define(kw_only=True, eq=False)
class OnlineWork:
    """Rollouts, and the updates that each is used for."""

    trainer: "OnlineTrainer"
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
    figures: dict[str, float] = field(factory=dict)
    """What is told of the rollout."""

    def __attrs_post_init__(self) -> None:
        self.kl_coeff = self.trainer.kl_coeff

    def update(self, tell: Tell) -> Update:
        """One update; before it a rollout, where the last one is used up."""
        if not self.order:
            self._roll_out(tell)
        batch = self._minibatch(self.order.pop(0))
        done = self.policy.update(batch, self.trainer.loss(self.kl_coeff))
        statistics = {**self.figures, **done.statistics}
        value_loss = self.trainer.value_loss()
        if value_loss is not None and self.value is not None:
            of_value = self.value.update(batch, value_loss)
            statistics |= {"value_loss": of_value.loss, **of_value.statistics}
        return _Told(
            loss=done.loss,
            grad_norm=done.grad_norm,
            learning_rate=done.learning_rate,
            tokens=done.tokens,
            skipped=done.skipped,
            statistics=statistics,
        )

    def evaluate(self, tell: Tell) -> Mapping[str, float]:
        """Mean reward of one response to each held-out prompt, and some of them told.

        Every process judges all of them, on chance of its own that is the same each time.
        """
        if not self.held_out:
            return {}
        ranks = self.policy.data_ranks
        share = -(-len(self.held_out) // ranks)
        padded = [*self.held_out, *self.held_out][: share * ranks]
        mine = padded[self.policy.data_rank * share :][:share]
        responses = self._draw(mine, count=1, seed=HELD_OUT_SEED)
        everyone = _responses(gather_rows(self.policy, _tensors(responses)))
        scores, samples = self.scoring(padded, everyone)
        count = len(self.held_out)
        figures = {"reward": _mean(scores.total[:count])}
        if len(scores.parts) > 1:
            figures |= {name: _mean(part[:count]) for name, part in scores.parts.items()}
        figures["response_tokens"] = float(everyone.lengths[:count].float().mean())
        for index in range(min(self.trainer.evaluate_samples, count)):
            _tell_sample(tell, samples[index], float(scores.total[index]))
        return figures

    def state(self) -> State:
        """Engines, rollout, and where chance and data stand."""
        tensors = {f"buffer.{name}": value for name, value in self.buffer.items()}
        for prefix, engine in self._engines():
            tensors |= {f"{prefix}.{name}": t for name, t in engine.state_dict().items()}
        facts = {
            "rollouts": self.rollouts,
            "equal_in_a_row": self.equal_in_a_row,
            "kl_coeff": self.kl_coeff,
            "order": self.order,
            "figures": self.figures,
        }
        return State(tensors=tensors, facts=facts)

    def load(self, state: State) -> None:
        """Go to where `state` was taken."""
        for prefix, engine in self._engines():
            own = engine.state_dict()
            kept = _below(state.tensors, prefix)
            engine.load_state_dict({name: _as(own.get(name), kept[name]) for name in kept})
        self.buffer = _below(state.tensors, "buffer")
        facts = state.facts
        self.rollouts, self.order = facts["rollouts"], facts["order"]
        self.equal_in_a_row, self.kl_coeff = facts["equal_in_a_row"], facts["kl_coeff"]
        self.figures = facts["figures"]

    def _engines(self) -> list[tuple[str, Engine]]:
        own_value = self.value is not None and self.value is not self.policy
        return [
            ("policy", self.policy),
            *([("value", self.value)] if own_value and self.value else []),
        ]

    def _minibatch(self, rows: list[int]) -> dict[str, Tensor]:
        """This data rank's rows of an update."""
        mine = rows[self.policy.data_rank :: self.policy.data_ranks]
        return {name: value[mine] for name, value in self.buffer.items()}

    def _roll_out(self, tell: Tell) -> None:
        """Draw, judge and prepare responses, and lay down in which order they are used."""
        trainer = self.trainer
        count = trainer.batch_size // trainer.group_size
        order = PromptOrder(count=len(self.prompts), seed=trainer.seed)
        chosen = [self.prompts[index] for index in order.take(self.rollouts * count, count)]
        seed = seed_of(trainer.seed, self.rollouts, apart=SEEDS)
        share = count // self.policy.data_ranks
        mine = chosen[self.policy.data_rank * share :][:share]
        responses = self._draw(mine, count=trainer.group_size, seed=seed)
        rows = self._prepare(mine, responses, max(len(prompt.tokens) for prompt in chosen))
        everyone = _responses(gather_rows(self.policy, _tensors(responses)))
        repeated = [prompt for prompt in chosen for _ in range(trainer.group_size)]
        scores, samples = self.scoring(repeated, everyone)
        shaped = shaped_scores(
            scores.total,
            everyone,
            missing_stop_penalty=trainer.missing_stop_penalty,
            length_penalty=trainer.length_penalty,
            clip=trainer.reward_clip,
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
        self._check(experience, tell)
        self.buffer = {**rows, **trainer.advantages(experience, self.kl_coeff)}
        self._lay_down(experience)
        self._tell_rollout(experience, everyone, scores.total, scores.parts, tell)
        for failure in scores.failures:
            tell.event("reward_failure", {"rollout": self.rollouts, "problem": failure})
        index = self.rollouts % len(samples)
        _tell_sample(tell, samples[index], float(scores.total[index]), show=False)
        if trainer.controller is not None:
            self.kl_coeff = trainer.controller.next(
                self.kl_coeff, self.figures["kl"], trainer.batch_size
            )
        self.rollouts += 1

    def _draw(self, prompts: Sequence[Prompt], *, count: int, seed: int) -> Responses:
        tokens = [prompt.tokens for prompt in prompts]
        return self.generator(tokens, self.trainer.sampling, count=count, seed=seed)

    def _prepare(
        self, prompts: Sequence[Prompt], responses: Responses, longest: int
    ) -> dict[str, Tensor]:
        """The rows of all data ranks, with what the models say of them."""
        trainer = self.trainer
        repeated = [prompt.tokens for prompt in prompts for _ in range(trainer.group_size)]
        # Data ranks must agree on a width, and know only their own responses.
        width = longest + trainer.max_new_tokens if self.policy.data_ranks > 1 else None
        rows = sequences(repeated, responses, longest=width)
        temperature = trainer.sampling.policy_temperature
        if "old_logprobs" not in rows or trainer.recompute_logprobs:
            rows["old_logprobs"] = logprobs_of(self.policy, rows, temperature)
        if self.reference is not None:
            with self.reference.while_asked():
                rows["reference_logprobs"] = logprobs_of(self.reference.engine, rows, temperature)
        if self.value is not None:
            rows["old_values"] = values_of(self.value, rows)
        return gather_rows(self.policy, rows)

    def _check(self, experience: Experience, tell: Tell) -> None:
        """Refuse what would be trained on in vain."""
        if not experience.mask.any():
            raise NothingToLearnError(
                f"rollout {self.rollouts}: no response token is left to learn from; look at the "
                "rewards that failed, or at max_new_tokens"
            )
        if not self.trainer.learns_from_groups:
            return
        kept = experience.kept
        groups = experience.scores.view(-1, self.trainer.group_size)
        left_out = ~kept.view(groups.shape)
        highest = groups.masked_fill(left_out, -torch.inf).amax(1)
        lowest = groups.masked_fill(left_out, torch.inf).amin(1)
        self.equal_in_a_row = 0 if bool((highest > lowest).any()) else self.equal_in_a_row + 1
        if self.equal_in_a_row:
            tell.event("equal_rewards", {"rollout": self.rollouts, "in_a_row": self.equal_in_a_row})
        if self.equal_in_a_row >= self.trainer.equal_rewards_limit:
            last = float(experience.scores[kept][0])
            raise NothingToLearnError(
                f"in {self.equal_in_a_row} rollouts in a row all responses to a prompt had the "
                f"same reward (the last {last:g}), so nothing was learned; "
                "give prompts of another difficulty, a reward with more shades, a higher "
                "temperature, or a greater group_size"
            )

    def _lay_down(self, experience: Experience) -> None:
        """Which rows each update takes: every epoch an order of its own, like lengths together."""
        size = self.trainer.minibatch_size or self.trainer.batch_size
        if size % self.policy.data_ranks:
            raise ConfigError(
                f"minibatch_size {size} does not divide over {self.policy.data_ranks} data ranks"
            )
        mask = experience.mask
        ends = torch.where(mask, torch.arange(mask.shape[1]), 0).amax(1).tolist()
        seed = seed_of(self.trainer.seed, self.rollouts, apart=SEEDS)
        chance = torch.Generator().manual_seed(seed)
        self.order = []
        for _ in range(self.trainer.epochs):
            rows = torch.randperm(len(ends), generator=chance).tolist()
            for start in range(0, len(rows), size):
                self.order.append(sorted(rows[start : start + size], key=lambda row: ends[row]))

    def _tell_rollout(
        self,
        experience: Experience,
        responses: Responses,
        scores: Tensor,
        parts: Mapping[str, Tensor],
        tell: Tell,
    ) -> None:
        kept = experience.kept
        divergence = experience.divergence().sum(1)
        self.figures = {"reward": _mean(scores), "kl": _mean(divergence[kept])}
        told: dict[str, int | float | str] = {
            "rollout": self.rollouts,
            **self.figures,
            "shaped_reward": _mean(experience.scores),
            "reward_std": float(scores[kept].std(correction=0)),
            "kl_coeff": self.kl_coeff,
            "response_tokens": float(responses.lengths.float().mean()),
            "stopped": float(responses.stopped.float().mean()),
            "left_out": int((~kept).sum()),
        }
        if len(parts) > 1:
            told |= {f"reward.{name}": _mean(part) for name, part in parts.items()}
        tell.event("rollout", told)


def _mean(values: Tensor) -> float:
    kept = values[values.isfinite()]
    return float(kept.mean()) if len(kept) else 0.0


def _tell_sample(tell: Tell, sample: Sample, value: float, *, show: bool = True) -> None:
    tell.event("sample", {"prompt": sample.prompt, "response": sample.response, "reward": value})
    if show and sample.response:
        tell.note(
            f"sample ({value:g}): {_printable(sample.prompt)} → {_printable(sample.response)}"
        )


def _printable(text: str) -> str:
    """On one line, without what a terminal would obey."""
    return "".join(c if c.isprintable() else " " for c in text[-200:])


def _tensors(responses: Responses) -> dict[str, Tensor]:
    return {
        "tokens": responses.tokens,
        "lengths": responses.lengths,
        "stopped": responses.stopped,
    }


def _responses(tensors: Mapping[str, Tensor]) -> Responses:
    return Responses(
        tokens=tensors["tokens"],
        lengths=tensors["lengths"],
        stopped=tensors["stopped"],
        logprobs=None,
        sampling_logprobs=None,
    )


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    start = f"{prefix}."
    return {name[len(start) :]: t for name, t in tensors.items() if name.startswith(start)}


def _as(own: Any, local: Tensor) -> Tensor:
    """A kept tensor in the form of the engine's own: of a DTensor this process's part was kept."""
    if own is not None and hasattr(own, "to_local"):
        part: Tensor = own.to_local()
        part.copy_(local)
        return own  # type: ignore[no-any-return]
    return local
