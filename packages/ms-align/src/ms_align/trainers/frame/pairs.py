"""Learning from preference pairs: DPO, and reward models."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from attrs import field, frozen
from torch import Tensor, nn

from ms_align.engines.local import LocalEngine
from ms_align.engines.optimizer import OptimizerOptions
from ms_align.engines.protocol import Engine, Update
from ms_align.engines.reference import ADAPTER_OFF, Reference, reference_of
from ms_align.errors import ConfigError, NothingToLearnError
from ms_align.losses.dpo import DPOLoss, dpo_loss, pair_weights, row_logprobs
from ms_align.losses.pairwise import PairwiseLoss, pairwise_loss, row_scores
from ms_align.losses.protocol import Batch, Loss, Output
from ms_align.models.reward_model import HEAD_FILE, RewardModel
from ms_align.run.checkpoint import State
from ms_align.run.initial_weights import checksum_of, name_of
from ms_align.run.loop import Loop, Result, Tell
from ms_align.run.options import RunOptions
from ms_align.run.ownership import Ownership, plain
from ms_align.run.results import check_finite, result_of, write_result
from ms_align.run.samples import Showing
from ms_align.settings import flag, number
from ms_align.streams.protocol import Stream, check_fit, endless
from ms_align.streams.text_ends import Endings, tokenizer_beside
from ms_align.tokenizer_files import TokenizerFiles

__all__ = ["DPOOptions", "DPOTrainer", "RewardOptions", "RewardTrainer"]

HeldOut = Callable[[], Iterable[Mapping[str, Any]]]


class _PairTrainer(ABC):
    """What training on pairs has in common."""

    algorithm: str
    engine: Engine
    showing: Showing | None = None
    merge: bool = True

    def __init__(
        self,
        stream: Stream,
        held_out: HeldOut | None,
        options: RunOptions | None,
        tokenizer: Any,
        owner: Ownership | None,
    ) -> None:
        self.stream = stream
        self.held_out = held_out
        self.options = options or RunOptions()
        self.owner = owner
        self.tokenizer = tokenizer_beside(tokenizer, stream)
        self.endings = Endings.of(self.tokenizer)
        self.step = 0
        self.beginning: dict[str, int | None] = {}
        """Checksums of the weights that nothing but the caller keeps."""
        check_fit(self.engine, stream, "preference data")

    @property
    @abstractmethod
    def loss(self) -> Loss:
        """What is made smaller."""

    @abstractmethod
    def judge(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Loss of each held-out pair (P,), and by how much the chosen one is ahead (P,)."""

    def prepare(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """A batch with all that the loss reads."""
        return batch

    @property
    def output_dir(self) -> Path:
        """Where the run lies."""
        return self.options.output_dir or Path("runs", self.algorithm)

    @property
    @abstractmethod
    def own_settings(self) -> object:
        """Those of the algorithm, an attrs instance."""

    def train(self, steps: int) -> Result:
        """Make `steps` updates over all launches; goes on from the last checkpoint.

        The model is then in `output_dir/model`, its tokenizer beside it.

        Args:
            steps: of the whole run.

        Raises:
            NonFiniteError: a weight is infinite or no number.
            AlignError: see `ms_align.run.loop.Loop`.
        """
        check_finite(self.engine)
        return Loop(
            self,
            steps=steps,
            options=self.options,
            folder=self.output_dir,
            owner=self._owner(),
            write=lambda: self.write(self.tokenizer and self.tokenizer.ending(self.endings.found)),
            result=self.result(),
        ).run()

    def result(self) -> Path:
        """The folder that `write` writes last."""
        return result_of(self.engine, self.output_dir, merge=self.merge)

    def write(self, tokenizer: TokenizerFiles | None) -> None:
        """Write the trained model."""
        write_result(self.engine, self.output_dir, tokenizer, merge=self.merge)

    def _owner(self) -> Ownership:
        identity = {
            "model": name_of(getattr(self.engine, "module", self.engine)),
            **(self.owner.identity if self.owner else {}),
            **{name: f"{one or 0:08x}" for name, one in self.beginning.items()},
        }
        settings = {**plain(self.own_settings), **plain(self.options)}
        return Ownership(
            kind=f"ms-align {self.algorithm}",
            identity=identity,
            settings=self.owner.settings if self.owner else settings,
            fixed=("seed", "lora"),
            reads=self.owner.reads if self.owner else {},
        )

    def update(self, tell: Tell) -> Update:
        """One update."""
        batch = self.prepare(endless(self.stream))
        self.endings.look(batch)
        update = self.engine.update(batch, self.loss)
        if update.skipped and update.loss == 0.0 and update.grad_norm == 0.0:
            raise NothingToLearnError(
                f"no pair of step {self.step + 1} has a target or a weight above 0, so nothing "
                "would be learned; look at the data, or raise sequence_length"
            )
        self.step += 1
        return update

    def evaluate(self, tell: Tell) -> Mapping[str, float]:
        """Held-out loss, how often the chosen answer is ahead, and by how much; samples told."""
        if self.showing is not None:
            self.showing.tell(self.engine, tell)
        if self.held_out is None:
            return {}
        totals = torch.zeros(4, dtype=torch.float64)
        for batch in self.held_out():
            rows = {name: torch.as_tensor(value) for name, value in batch.items()}
            losses, ahead = self.judge(rows)
            weights = self.engine.gather(pair_weights(rows).to(losses.device)).cpu().double()
            told = [self.engine.gather(one).cpu().double() for one in (losses, ahead)]
            parts = (weights, weights * told[0], weights * (told[1] > 0), weights * told[1])
            totals += torch.stack([part.sum() for part in parts])
        weight, loss, right, ahead_by = totals.tolist()
        if weight == 0:
            raise NothingToLearnError("the held-out data has no pair; hold out more of it")
        return {
            "held_out_loss": loss / weight,
            "held_out_accuracy": right / weight,
            "held_out_margin": ahead_by / weight,
        }

    def state(self) -> State:
        """Weights, moments and the stream's place."""
        facts = {
            "step": self.step,
            "stream": self.stream.state_dict(),
            "endings": sorted(self.endings.found),
        }
        return State(tensors=self.engine.state_dict(), facts=facts)

    def load(self, state: State) -> None:
        """Go to where `state` was taken."""
        self.engine.load_state_dict(state.tensors)
        self.step = int(state.facts["step"])
        self.endings.found |= set(state.facts["endings"])
        self.stream.load_state_dict(state.facts["stream"])


@frozen(kw_only=True, slots=False)  # a run file inherits from more than one
class DPOOptions:
    """DPO's own settings."""

    beta: float = field(default=0.1, validator=number(least=1e-6))
    """How strongly the reference holds."""
    label_smoothing: float = field(default=0.0, validator=number(below=0.5))
    """Share of pairs that are taken to be the wrong way round."""
    reference_free: bool = field(default=False, validator=flag)
    """Take the reference to be uniform."""


class DPOTrainer(_PairTrainer):
    """Direct preference optimisation.

    Args:
        model: any causal language model, which is run in this process; or an engine.
        stream: pairs; see `ms_data.PreferenceStream`.
        reference: an engine, model or folder. None copies the model as it is, or switches its
            adapter off where it has one.
        held_out: makes an iterator of held-out batches.
        showing: prompts whose answers are told at each evaluation.
        dpo: its own settings.
        optimizer: AdamW's settings, for a model; an engine has its own.
        microbatch_size: rows that pass at once, for a model; even, so that pairs stay whole.
        options: how the run goes on, shows and keeps.
        tokenizer: what is put beside the trained model: a folder or a tokenizer; by default what
            lies in the stream's folder.
        merge: with adapters, write the merged model too.
        owner: what else the run says of itself when it takes `output_dir`.

    Raises:
        ConfigError: an engine is given and no reference, unless `reference_free`.
        ModelError: tokenizer and model disagree, or rows are longer than the context.
    """

    algorithm = "dpo"

    def __init__(
        self,
        model: nn.Module | Engine,
        stream: Stream,
        *,
        reference: nn.Module | Engine | str | None = None,
        held_out: HeldOut | None = None,
        showing: Showing | None = None,
        dpo: DPOOptions | None = None,
        optimizer: OptimizerOptions | None = None,
        microbatch_size: int | None = None,
        options: RunOptions | None = None,
        tokenizer: Any = None,
        merge: bool = True,
        owner: Ownership | None = None,
    ) -> None:
        self.dpo = dpo or DPOOptions()
        self.merge = merge
        self.showing = showing
        self.engine = _engine_of(model, optimizer, microbatch_size)
        self.reference = self._reference(reference, microbatch_size)
        super().__init__(stream, held_out, options, tokenizer, owner)
        self.beginning["policy"] = checksum_of(self.engine)
        if self.reference is not None:
            self.beginning["reference"] = checksum_of(self.reference.engine)

    def _reference(self, given: Any, microbatch_size: int | None) -> Reference | None:
        if self.dpo.reference_free:
            return None
        parts = getattr(self.engine, "adapters", None)
        if given is None and parts is not None:
            return Reference(self.engine, parts.disable_adapter)
        adapted = hasattr(getattr(self.engine, "module", None), "disable_adapter")
        wanted = ADAPTER_OFF if given is None and adapted else given
        return reference_of(
            wanted, self.engine, lambda model: _engine_of(model, None, microbatch_size)
        )

    @property
    def own_settings(self) -> DPOOptions:
        """DPO's own."""
        return self.dpo

    @property
    def loss(self) -> DPOLoss:
        """The mean DPO loss."""
        return DPOLoss(
            beta=self.dpo.beta,
            label_smoothing=self.dpo.label_smoothing,
            reference_free=self.dpo.reference_free,
        )

    def prepare(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Adds `reference_logprobs` (B,)."""
        if self.reference is None:
            return batch
        rows = {name: torch.as_tensor(value) for name, value in batch.items()}
        with self.reference.while_asked():
            found = self.reference.engine.evaluate(rows, row_logprobs)
        return {**rows, "reference_logprobs": found.cpu()}

    def judge(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """DPO's loss, and the implicit reward's margin."""
        rows = self.prepare(batch)
        own = self.engine.evaluate(rows, row_logprobs).cpu().view(-1, 2)
        reference = torch.zeros_like(own)
        if self.reference is not None:
            reference = rows["reference_logprobs"].view(-1, 2)
        losses = dpo_loss(
            *own.T,
            *reference.T,
            beta=self.dpo.beta,
            label_smoothing=self.dpo.label_smoothing,
        )
        rewards = self.dpo.beta * (own - reference)
        return losses, rewards[:, 0] - rewards[:, 1]


@frozen(kw_only=True, slots=False)  # a run file inherits from more than one
class RewardOptions:
    """A reward model's own settings."""

    margin_scale: float = field(default=1.0, validator=number())
    """Factor of the data's margins; 0 leaves them out."""
    centring: float = field(default=0.01, validator=number())
    """Of the square of a pair's sum of scores; keeps scores around 0."""


class RewardTrainer(_PairTrainer):
    """Trains a reward model: a score at the last token of an answer.

    Args:
        model: a `RewardModel`, or any causal language model that shows hidden states.
        stream: pairs; see `ms_data.PreferenceStream`.
        held_out: makes an iterator of held-out batches.
        reward: its own settings.
        optimizer: AdamW's settings.
        microbatch_size: rows that pass at once; even, so that pairs stay whole.
        options: how the run goes on, shows and keeps.
        tokenizer: what is put beside the trained model: a folder or a tokenizer; by default what
            lies in the stream's folder.
        owner: what else the run says of itself when it takes `output_dir`.

    Raises:
        ConfigError: it is an engine, not a model.
        ModelError: the model shows no hidden states, or tokenizer and model disagree.
    """

    algorithm = "reward"
    head = "score"

    def __init__(
        self,
        model: nn.Module,
        stream: Stream,
        *,
        held_out: HeldOut | None = None,
        reward: RewardOptions | None = None,
        optimizer: OptimizerOptions | None = None,
        microbatch_size: int | None = None,
        options: RunOptions | None = None,
        tokenizer: Any = None,
        owner: Ownership | None = None,
    ) -> None:
        self.reward = reward or RewardOptions()
        if not isinstance(model, nn.Module):
            raise ConfigError(
                "a reward model is trained whole and in one process, and this is a "
                f"{type(model).__name__}; give a torch.nn.Module"
            )
        body = model.body if isinstance(model, RewardModel) else model
        self.local = LocalEngine(
            body,
            optimizer,
            heads={self.head: 1},
            head_offsets=isinstance(model, RewardModel) and model.head.bias is not None,
            microbatch_size=microbatch_size,
        )
        if isinstance(model, RewardModel):
            self.local.heads[self.head].load_state_dict(model.head.state_dict())
        self.engine = self.local
        super().__init__(stream, held_out, options, tokenizer, owner)

    @property
    def own_settings(self) -> RewardOptions:
        """A reward model's own."""
        return self.reward

    def result(self) -> Path:
        """What `write` writes last."""
        return self.output_dir / "model" / HEAD_FILE

    def write(self, tokenizer: TokenizerFiles | None) -> None:
        """Write the reward model, which PPO takes by its folder."""
        check_finite(self.engine)
        self.reward_model().save(self.output_dir / "model", tokenizer)

    @property
    def loss(self) -> PairwiseLoss:
        """The mean pairwise loss."""
        return PairwiseLoss(
            margin_scale=self.reward.margin_scale, centring=self.reward.centring, head=self.head
        )

    def judge(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """The pairwise loss without margin and centring, and the gap of the scores."""
        scores = self.engine.evaluate(batch, self._scores).cpu().view(-1, 2)
        return pairwise_loss(*scores.T), scores[:, 0] - scores[:, 1]

    def reward_model(self) -> RewardModel:
        """The model as it stands; a reward for PPO, and `save` writes it."""
        return RewardModel(self.local.module, cast(nn.Linear, self.local.heads[self.head]))

    def _scores(self, output: Output, batch: Batch) -> Tensor:
        return row_scores(output, batch, self.head)


def _engine_of(
    model: nn.Module | Engine, optimizer: OptimizerOptions | None, microbatch_size: int | None
) -> Engine:
    if not isinstance(model, nn.Module):
        return model
    if microbatch_size is not None and microbatch_size % 2:
        raise ConfigError(f"microbatch_size is {microbatch_size}; pairs need an even one")
    return LocalEngine(model, optimizer, microbatch_size=microbatch_size)
