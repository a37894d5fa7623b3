"""What all trainers that learn from their own responses share: settings, models, the loop's work.

A rollout draws responses to some prompts, scores them, and is then used for several updates; all
of it is in a checkpoint, so a run that was killed between any two updates goes on bit for bit.
"""

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import torch
from attrs import evolve, field, fields, frozen
from attrs.converters import optional
from torch import Tensor, nn

from ms_align.engines.local import LocalEngine
from ms_align.engines.optimizer import OptimizerOptions
from ms_align.engines.protocol import Engine
from ms_align.engines.reference import Reference, reference_of
from ms_align.errors import ConfigError, ModelError
from ms_align.generation import Generator, LocalGenerator
from ms_align.generation.engine_generator import EngineGenerator
from ms_align.generation.sampling import Sampling, token_numbers
from ms_align.generation.stopping import beside, stopping
from ms_align.losses.kl import AdaptiveKL
from ms_align.losses.protocol import Loss
from ms_align.models.folder import load_model
from ms_align.rewards.named import named_rewards
from ms_align.rewards.scoring import Failure, rewards_of
from ms_align.rollouts.experience import Experience, Scoring
from ms_align.rollouts.learner import OnlineWork
from ms_align.rollouts.prompts import Prompt, prompts_checksum, read_prompts
from ms_align.run.initial_weights import name_of, weights_checksum
from ms_align.run.loop import Loop, Result
from ms_align.run.options import RunOptions
from ms_align.run.ownership import Ownership, plain
from ms_align.run.results import check_finite, result_of, write_result
from ms_align.settings import flag, number, one_of, whole
from ms_align.tokenizer import Tokenizer, load_tokenizer
from ms_align.tokenizer_files import TokenizerFiles, files_of

__all__ = ["OnlineTrainer"]


@frozen(kw_only=True, slots=False)
class OnlineTrainer(Sampling, OptimizerOptions, RunOptions):
    """Settings that PPO, GRPO and RLOO share, beside those of sampling, optimizer and run."""

    algorithm: ClassVar[str]

    policy_model: Any
    """What learns: a torch.nn.Module, an Engine, or the folder of a model."""
    reward_model: Any
    """Any callable on samples, any torch.nn.Module, the folder of a reward model, several of
    them, or names with weights."""
    reference_model: Any = None
    """What the KL holds the policy near: a module, an Engine, a folder, `"adapter_off"` for the
    policy without its adapters, or None for a frozen copy of the policy as it begins."""
    tokenizer: Any = None
    """Has `encode` and `decode`; or a name for `load_tokenizer`. By default the one that lies in
    the policy's folder. Needed for texts alone; it is put beside the trained model."""
    stop_tokens: Any = field(default=None, converter=optional(token_numbers))
    """Each ends a response, and is its last token; None for those that end a text of the model."""
    generator: Generator | None = None
    """Draws the responses; the built-in one by default."""
    steps: int = field(default=100, validator=whole())
    """Updates of the whole run."""
    batch_size: int = field(default=64, validator=whole())
    """Responses of one rollout, over all processes."""
    minibatch_size: int | None = field(default=None, validator=whole(optional=True))
    """Responses of one update; all of the rollout by default."""
    microbatch_size: int | None = field(default=None, validator=whole(optional=True))
    """Responses that pass a model at once; all of the update by default."""
    group_size: int = field(default=1, validator=whole())
    """Responses to each prompt."""
    epochs: int = field(default=1, validator=whole())
    """Passes over one rollout."""
    slots: int = field(default=64, validator=whole())
    """Responses that are written at once."""
    kl_coeff: float = field(default=0.0, validator=number())
    """How much a nat of KL from the reference costs."""
    kl_in: Literal["reward", "loss"] = field(default="reward", validator=one_of("reward", "loss"))
    """Where the KL stands: in the `reward` or in the `loss`."""
    kl_estimator: str = "k1"
    """`k1`, `k2` or `k3` in the reward; `k2`, `k3`, `k3_weighted` or `k1_to_go` in the loss."""
    kl_target: float | None = field(default=None, validator=number(optional=True))
    """KL of a response in nats that the coefficient is moved towards, from a `kl_coeff` above 0;
    None keeps it."""
    kl_horizon: int = field(default=10_000, validator=whole())
    """Responses over which the coefficient moves towards `kl_target`."""
    entropy_coeff: float = field(default=0.0, validator=number())
    """How much a nat of entropy of the policy is worth."""
    clip_low: float = field(default=0.2, validator=number())
    """A ratio below 1 minus this gains nothing."""
    clip_high: float = field(default=0.2, validator=number())
    """A ratio above 1 plus this gains nothing."""
    missing_stop_penalty: float = field(default=0.0, validator=number())
    """Taken from the reward of a response that its length ended."""
    length_penalty: float = field(default=0.0, validator=number())
    """Taken from the reward for each token of a response."""
    reward_clip: float | None = field(default=None, validator=number(optional=True))
    """Rewards are held within plus and minus it."""
    on_reward_failure: Failure = field(default="stop", validator=one_of("stop", "skip", "penalise"))
    """What a reward that fails does: `stop` the run, `skip` the sample, or `penalise` it."""
    reward_failure_penalty: float = field(default=-1.0, validator=number(least=-math.inf))
    """The reward of a sample that is penalised."""
    equal_rewards_limit: int = field(default=10, validator=whole())
    """Rollouts in a row of which nothing can be learned, after which the run is refused."""
    recompute_logprobs: bool = field(default=False, validator=flag)
    """Ask the training forward for the log-probabilities of a rollout; always so where the
    generator keeps none."""
    held_out: Any = None
    """Prompts, as `prompt_dataset`, that are never learned from."""
    evaluate_samples: int = field(default=3, validator=whole(least=0))
    """Held-out samples that are shown at each evaluation."""

    def __attrs_post_init__(self) -> None:
        size = self.minibatch_size or self.batch_size
        if self.batch_size % size:
            raise ConfigError(
                f"batch_size {self.batch_size} does not divide into minibatches of {size}; choose "
                "a minibatch_size that divides it"
            )
        if self.batch_size % self.group_size:
            raise ConfigError(
                f"batch_size {self.batch_size} does not divide into groups of {self.group_size}; "
                "choose a group_size that divides it"
            )
        allowed = ("k1", "k2", "k3") if self.kl_in == "reward" else LOSS_ESTIMATORS
        if self.kl_estimator not in allowed:
            raise ConfigError(
                f"kl_estimator is {self.kl_estimator!r} with the KL in the {self.kl_in}; give one "
                f"of {', '.join(allowed)}"
            )
        if self.kl_target is not None:
            self.controller  # noqa: B018 - its own checks
            if not self.kl_coeff:
                raise ConfigError(
                    f"kl_target is {self.kl_target} and kl_coeff 0, of which any multiple is 0; "
                    "give a kl_coeff above 0 to begin with"
                )

    @property
    def sampling(self) -> Sampling:
        """How responses are drawn."""
        given = {each.name: getattr(self, each.name) for each in fields(Sampling)}
        return Sampling(**{**given, "stop_tokens": self.stop_tokens or ()})

    @property
    def place(self) -> Path:
        """The run's folder."""
        return self.output_dir or Path("runs", self.algorithm)

    @property
    def controller(self) -> AdaptiveKL | None:
        """What moves the KL's coefficient; None keeps it."""
        if self.kl_target is None:
            return None
        return AdaptiveKL(target=self.kl_target, horizon=self.kl_horizon)

    def optimize(
        self,
        prompt_dataset: str | Path | Iterable[Any],
        response_dataset: str | Path | Iterable[Any] | None = None,
    ) -> Result:
        """Learn from responses to prompts, to the end or to SIGTERM, going on where it stopped.

        Args:
            prompt_dataset: texts, lists of tokens, chats, mappings with a key `prompt`, or the
                path of a JSON Lines file of them.
            response_dataset: by choice the known answer to each prompt, in the same order. The
                policy is never trained on it: each reward finds it in `sample.answer`.

        Returns:
            What the run came to. The trained model lies in `output_dir/model`, its tokenizer
            beside it.

        Raises:
            ConfigError: a setting does not fit another.
            FolderError: `output_dir` is another run's.
            DataError: the dataset is empty, or a prompt or the tokenizer does not fit the model.
            RewardError: a reward failed and `on_reward_failure="stop"`.
            NonFiniteError: a weight is infinite or no number.
            NothingToLearnError: too many rollouts in a row gave no difference to learn from.
        """
        tokenizer = self._tokenizer()
        files = files_of(beside(self.tokenizer, self.policy_model), tokenizer)
        sampling = stopping(self.sampling, self.stop_tokens, tokenizer, files)
        ready = evolve(self, stop_tokens=sampling.stop_tokens, stop_strings=sampling.stop_strings)
        return ready._optimize(prompt_dataset, response_dataset, tokenizer, files)

    def _optimize(
        self, dataset: Any, answers: Any, tokenizer: Tokenizer | None, files: TokenizerFiles | None
    ) -> Result:
        prompts = read_prompts(dataset, tokenizer, answers)
        held_out = (
            [] if self.held_out is None else read_prompts(self.held_out, tokenizer, what="held_out")
        )
        torch.manual_seed(self.seed)
        work = self._work(prompts, held_out, tokenizer)
        check_finite(work.policy)
        folder = self.place
        return Loop(
            work,
            steps=self.steps,
            options=self,
            folder=folder,
            owner=self._owner(work, prompts, dataset),
            write=lambda: write_result(work.policy, folder, files),
            result=result_of(work.policy, folder),
        ).run()

    @abstractmethod
    def loss(self, kl_coeff: float) -> Loss:
        """The policy's loss at a coefficient of the KL."""

    @abstractmethod
    def advantages(self, experience: Experience, kl_coeff: float) -> dict[str, Tensor]:
        """What the loss reads beside the tokens, (N, S) each, from a scored rollout."""

    def value_loss(self) -> Loss | None:
        """The loss of a value model of its own, if there is one."""
        return None

    def heads(self) -> dict[str, int]:
        """Extra heads of the policy."""
        return {}

    def value_engine(self, policy: Engine) -> Engine | None:
        """What estimates values; None where nothing does."""
        return None

    @property
    def learns_from_groups(self) -> bool:
        """Whether equal rewards in each group teach nothing."""
        return False

    def _work(
        self, prompts: list[Prompt], held_out: list[Prompt], tokenizer: Tokenizer | None
    ) -> OnlineWork:
        policy = self._engine(self.policy_model, heads=self.heads())
        _check_tokenizer(tokenizer, policy)
        rows = self.batch_size // self.group_size
        if rows % policy.data_ranks:
            raise ConfigError(
                f"{rows} prompts a rollout do not divide over {policy.data_ranks} data ranks; "
                "choose a batch_size that does"
            )
        return OnlineWork(
            trainer=self,
            policy=policy,
            value=self.value_engine(policy),
            reference=self._reference(policy),
            generator=self._generator(policy, tokenizer),
            scoring=Scoring(
                rewards=rewards_of(named_rewards(self.reward_model)),
                tokenizer=tokenizer,
                on_failure=self.on_reward_failure,
                penalty=self.reward_failure_penalty,
            ),
            prompts=prompts,
            held_out=held_out,
        )

    def _engine(self, model: Any, *, heads: dict[str, int] | None = None) -> Engine:
        if isinstance(model, str | Path):
            model = load_model(model)
        if isinstance(model, nn.Module):
            return LocalEngine(
                model, self._optimizer(), heads=heads, microbatch_size=self.microbatch_size
            )
        if hasattr(model, "update") and hasattr(model, "evaluate"):
            return cast(Engine, model)
        raise ConfigError(
            f"a model is {type(model).__name__}; give a torch.nn.Module, an Engine or a folder"
        )

    def _optimizer(self) -> OptimizerOptions:
        names = [each.name for each in fields(OptimizerOptions)]
        return OptimizerOptions(**{name: getattr(self, name) for name in names})

    def _reference(self, policy: Engine) -> Reference | None:
        if not self.kl_coeff:
            return None
        return reference_of(self.reference_model, policy, self._engine)

    def _generator(self, policy: Engine, tokenizer: Tokenizer | None) -> Generator:
        if self.generator is not None:
            if not callable(self.generator):
                raise ConfigError(f"generator is {self.generator!r}; give a callable")
            return self.generator
        model = _module_of(policy)
        decode = tokenizer.decode if tokenizer else None
        if model is not None:
            return LocalGenerator(model, slots=self.slots, decode=decode)
        if hasattr(policy, "generate"):
            generator = EngineGenerator(cast(Any, policy), decode)
            generator.check(self.sampling)
            return generator
        raise ConfigError(f"{type(policy).__name__} does not generate; give generator=")

    def _tokenizer(self) -> Tokenizer | None:
        given = beside(self.tokenizer, self.policy_model)
        if isinstance(given, str | Path):
            return load_tokenizer(given)
        if given is not None and not (hasattr(given, "encode") and hasattr(given, "decode")):
            raise ConfigError(f"tokenizer is {given!r}; give a folder, a file, or a tokenizer")
        return cast("Tokenizer | None", given)

    def _owner(self, work: OnlineWork, prompts: Sequence[Prompt], dataset: Any) -> Ownership:
        models = ("policy_model", "reward_model", "reference_model", "value_model")
        read = {name: getattr(self, name, None) for name in models}
        weights = weights_checksum(work.policy.state_dict())
        identity = {
            "model": name_of(self.policy_model),
            "weights": "on several processes" if weights is None else f"{weights:08x}",
            "dataset": f"{len(prompts)} prompts" if not _is_path(dataset) else str(dataset),
            "prompts": prompts_checksum(prompts),
        }
        return Ownership(
            kind=f"ms-align {self.algorithm}",
            identity=identity,
            settings={**plain(self), **{name: name_of(one) for name, one in read.items()}},
            fixed=("seed", "batch_size", "minibatch_size", "group_size", "epochs", "value_model"),
            reads=read,
        )


def _is_path(dataset: Any) -> bool:
    return isinstance(dataset, str | Path)


LOSS_ESTIMATORS = ("k2", "k3", "k3_weighted", "k1_to_go")


def _module_of(engine: Engine) -> nn.Module | None:
    """The whole model of an engine, where this process holds it."""
    module = getattr(engine, "module", None)
    return module if isinstance(module, nn.Module) else None


def _check_tokenizer(tokenizer: Tokenizer | None, policy: Engine) -> None:
    """Refuse a tokenizer that has tokens which the model has not."""
    has = getattr(tokenizer, "vocabulary_size", None)
    model = getattr(policy, "model", None) or getattr(policy, "config", None)
    takes = getattr(model, "vocabulary_size", None) or getattr(model, "vocab_size", None)
    if has and takes and has > takes:
        raise ModelError(
            f"the tokenizer has {has} tokens and the model {takes}; give the tokenizer that the "
            "model was trained with"
        )
