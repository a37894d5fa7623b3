"""What trainers share that learn from their own responses: models, data, and the rollouts' start.

A rollout draws responses to some prompts, scores them, and is then used for several updates; all
of it is in a checkpoint, so a run that was killed between any two updates goes on bit for bit.
"""

import os
from abc import abstractmethod
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from attrs import Attribute, evolve, field, frozen
from attrs.converters import optional
from torch import Tensor

from ms_align.engines.protocol import Engine
from ms_align.engines.reference import ADAPTER_OFF, Reference, reference_of
from ms_align.errors import ConfigError, ModelError
from ms_align.generation.responses import Generator
from ms_align.generation.sampling import token_numbers
from ms_align.generation.stops import beside, with_stops
from ms_align.losses.protocol import Loss
from ms_align.models.folder import folder_of
from ms_align.rewards.named import named_rewards, reward_folders
from ms_align.rewards.scoring import rewards_of
from ms_align.rollouts.experience import Experience, Scoring
from ms_align.rollouts.generators import build_generator
from ms_align.rollouts.learner import RolloutLearner
from ms_align.rollouts.options import RolloutOptions
from ms_align.rollouts.prompts import Prompt, prompts_checksum, read_prompts
from ms_align.run.initial_weights import name_of, weights_checksum
from ms_align.run.loop import Notice, Result
from ms_align.settings import a_path, whole
from ms_align.tokenizer import Tokenizer, load_tokenizer
from ms_align.tokenizer_files import TokenizerFiles, check_same_tokenizer, files_of
from ms_align.trainers.frame.trainer import Trainer


def _prompts(instance: object, attribute: "Attribute[Any]", value: object) -> None:
    """Check for prompts, or the path of a file of them."""
    if isinstance(value, str | os.PathLike) or not isinstance(value, Iterable | None):
        a_path()(instance, attribute, value)


@frozen(kw_only=True, slots=False)
class OnlineTrainer(RolloutOptions, Trainer):
    """Models, and how long is trained."""

    learns_from_groups = False

    policy_model: Any = field(validator=a_path(objects=True))
    """What learns: the folder of a model, and in Python a torch.nn.Module or an Engine."""
    reward_model: Any = field(validator=a_path(several=True, objects=True))
    """Any callable on samples, any torch.nn.Module, the folder of a reward model, several of
    them, or names with weights."""
    reference_model: Any = field(default=None, validator=a_path(optional=True, objects=True))
    """What the KL holds the policy near: a folder, a module, an Engine, `"adapter_off"` for the
    policy without its adapters, or None for the policy as it begins."""
    tokenizer: Any = field(default=None, validator=a_path(optional=True, objects=True))
    """Has `encode` and `decode`; or a name for `load_tokenizer`. By default the one that lies in
    the policy's folder. Needed for texts alone; it is put beside the trained model."""
    stop_tokens: Any = field(default=None, converter=optional(token_numbers))
    """Each ends a response, and is its last token; None for those that end a text of the model."""
    generator: Any = "policy"
    """Draws the responses: `policy` for the policy's own engine, another module of
    `ms_align.rollouts.generators`, and in Python any `Generator`."""
    slots: int = field(default=64, validator=whole())
    """Responses that are written at once."""
    steps: int = field(default=100, validator=whole())
    """Updates of the whole run."""
    held_out: Any = field(default=None, validator=_prompts)
    """Prompts, as `prompt_dataset`, that are never learned from."""

    @property
    def fixed(self) -> tuple[str, ...]:
        """Settings that cannot change while a run goes on."""
        sizes = ("batch_size", "minibatch_size", "group_size", "epochs")
        return ("seed", "lora", *sizes, "value_model")

    def optimize(
        self,
        prompt_dataset: str | Path | Iterable[Any],
        response_dataset: str | Path | Iterable[Any] | None = None,
    ) -> Result:
        """Learn from responses to prompts, to the end or to SIGTERM, going on where it stopped.

        Args:
            prompt_dataset: texts, lists of tokens, chats, mappings with a key `prompt`, or the
                path of a JSON, CSV or Parquet file of them.
            response_dataset: by choice the known answer to each prompt, in the same order. The
                policy is never trained on it: each reward finds it in `sample.answer`.

        Returns:
            What the run came to. The trained model lies in `output_dir/model`, its tokenizer
            beside it; adapters lie in `output_dir/adapter`.

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
        self._check_tokenizers(files)
        sampling = with_stops(self.sampling, self.stop_tokens, tokenizer, files)
        ready = evolve(self, stop_tokens=sampling.stop_tokens, stop_strings=sampling.stop_strings)
        prompts = read_prompts(prompt_dataset, tokenizer, response_dataset)
        given = isinstance(prompt_dataset, str | Path)
        dataset = str(prompt_dataset) if given else f"{len(prompts)} prompts"
        return ready._optimize(prompts, dataset, tokenizer, files)

    def _optimize(
        self,
        prompts: list[Prompt],
        dataset: str,
        tokenizer: Tokenizer | None,
        files: TokenizerFiles | None,
    ) -> Result:
        torch.manual_seed(self.seed)
        policy = self.start_engine(self.policy_model, heads=self.heads(), adapted=True)
        learner = self._learner(policy, prompts, tokenizer)
        identity = {
            "model": name_of(self.policy_model),
            "weights": weights_checksum(policy),
            "dataset": dataset,
            "prompts": prompts_checksum(prompts),
        }
        return self.run(
            learner,
            policy,
            steps=self.steps,
            identity=identity,
            tokenizer=lambda: files,
            notices=self._prompt_notices(learner),
        )

    def _prompt_notices(self, learner: RolloutLearner) -> list[Notice]:
        """Say how many prompts there are, and whether any are held out."""
        held_out = len(learner.held_out)
        lengths = [len(prompt.tokens) for prompt in learner.prompts]
        fields = {"prompts": len(lengths), "held_out": held_out, "longest": max(lengths)}
        line = f"{len(lengths)} prompts of up to {max(lengths)} tokens, {held_out} held out"
        notices = [Notice(kind="prompts", fields=fields, line=line)]
        if self.evaluate_every is not None and not held_out:
            notices.append(
                Notice(
                    kind="no_held_out",
                    fields={"evaluate_every": self.evaluate_every, "lacking": "held_out"},
                    line="warning: nothing is evaluated, as there are no held-out prompts; give "
                    "held_out, or leave evaluate_every out",
                )
            )
        return notices

    @abstractmethod
    def loss(self, kl_coeff: float) -> Loss:
        """Build the policy's loss; the coefficient is 0 where the KL is not in the loss."""

    @abstractmethod
    def advantages(self, experience: Experience, kl_coeff: float) -> dict[str, Tensor]:
        """Compute what the loss reads beside the tokens, (N, S) each, from a scored rollout."""

    def value_loss(self) -> Loss | None:
        """Build the loss of a value model of its own, if there is one."""
        return None

    def heads(self) -> dict[str, int]:
        """Return the extra heads of the policy."""
        return {}

    def value_engine(self, policy: Engine) -> Engine | None:
        """Build what estimates values; None where nothing does."""
        return None

    def surrogate(self, kl_coeff: float) -> dict[str, Any]:
        """Return the settings of `PolicyLoss` that all algorithms take from here."""
        alike = ("clip_low", "clip_high", "entropy_coeff", "kl_estimator")
        found = {name: getattr(self, name) for name in alike}
        temperature = self.sampling.policy_temperature
        return {**found, "temperature": temperature, "kl_coeff": kl_coeff}

    def _learner(
        self, policy: Engine, prompts: list[Prompt], tokenizer: Tokenizer | None
    ) -> RolloutLearner:
        _check_vocabulary(tokenizer, policy, "the model")
        rows = self.batch_size // self.group_size
        if rows % policy.data_ranks:
            raise ConfigError(
                f"{rows} prompts a rollout do not divide over {policy.data_ranks} data ranks; "
                "choose a batch_size that does"
            )
        held_out: list[Prompt] = []
        if self.held_out is not None:
            held_out = read_prompts(self.held_out, tokenizer, what="held_out")
        value, reference = self.value_engine(policy), self._reference(policy)
        rewards = rewards_of(named_rewards(self.reward_model))
        if value is not None:
            _check_vocabulary(tokenizer or policy, value, "value_model")
        if reference is not None:
            _check_vocabulary(tokenizer or policy, reference.engine, "reference_model")
        for name, (reward, _) in rewards.items():
            _check_vocabulary(tokenizer or policy, reward, f"the reward model {name!r}")
        return RolloutLearner(
            algorithm=self,
            options=self,
            seed=self.seed,
            policy=policy,
            value=value,
            reference=reference,
            generator=self._generator(policy, tokenizer),
            scoring=Scoring(
                rewards=rewards,
                tokenizer=tokenizer,
                on_failure=self.on_reward_failure,
                penalty=self.reward_failure_penalty,
            ),
            prompts=prompts,
            held_out=held_out,
        )

    def _check_tokenizers(self, files: TokenizerFiles | None) -> None:
        """Refuse a tokenizer, or another model's folder, whose token ids are not the policy's."""
        base = self.base_folder
        name = f"the model {base}"
        if base is not None and self.tokenizer is not None:
            own, remedy = files_of(base), "leave `tokenizer` out"
            check_same_tokenizer(own, name, files, "`tokenizer`", remedy=remedy)
        others = {
            setting: folder_of(getattr(self, setting, None))
            for setting in ("reference_model", "value_model")
        }
        for setting, folder in others.items():
            if folder is not None and folder.is_dir():
                remedy = f"give a {setting} of the same family"
                other, other_name = files_of(folder), f"{setting} {folder}"
                check_same_tokenizer(files, name, other, other_name, remedy=remedy)
        for folder in reward_folders(self.reward_model):
            remedy = (
                "train a reward model with `ms-align reward` from a model with the policy's "
                "tokenizer, or give a function that decodes and scores the text"
            )
            other, other_name = files_of(folder), f"the reward model {folder}"
            check_same_tokenizer(files, name, other, other_name, remedy=remedy)

    def _reference(self, policy: Engine) -> Reference | None:
        if not self.kl_coeff:
            return None
        given = self.reference_model
        if given is None and self.lora is not None:
            given = ADAPTER_OFF
        if given is None and self.layout is not None:
            given = self.policy_model  # a split model is not copied but read once more
        return reference_of(given, policy, partial(self.start_engine, trained=False))

    def _generator(self, policy: Engine, tokenizer: Tokenizer | None) -> Generator:
        decode = tokenizer.decode if tokenizer else None
        if isinstance(self.generator, str):
            return build_generator(self.generator)(policy, slots=self.slots, decode=decode)
        if not callable(self.generator):
            raise ConfigError(f"generator is {self.generator!r}; give a name or a callable")
        return cast(Generator, self.generator)

    def _tokenizer(self) -> Tokenizer | None:
        given = beside(self.tokenizer, self.policy_model)
        if isinstance(given, str | Path):
            return load_tokenizer(given)
        if given is not None and not (hasattr(given, "encode") and hasattr(given, "decode")):
            raise ConfigError(f"tokenizer is {given!r}; give a folder, a file, or a tokenizer")
        return cast("Tokenizer | None", given)


def _check_vocabulary(tokenizer: object, model: object, name: str) -> None:
    """Refuse a model that lacks tokens of the tokenizer, or of the policy where there is none."""
    has, takes = (getattr(one, "vocabulary_size", None) for one in (tokenizer, model))
    if has and takes and has > takes:
        raise ModelError(
            f"{name} must know every token: the tokenizer has {has} tokens and {name} {takes}; "
            "give one that was trained with the policy's tokenizer"
        )
