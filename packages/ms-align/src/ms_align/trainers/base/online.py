"""Training on the policy's own responses: the trainer shared by PPO, GRPO and RLOO.

A rollout generates and scores responses and is used for several updates. Checkpoints include the
current rollout, so a run that is killed between any two updates resumes bit for bit.
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

from ms_align import processes
from ms_align.engines.protocol import Engine
from ms_align.engines.reference import ADAPTER_OFF, Reference, reference_of
from ms_align.environments.agents import AgentRunner
from ms_align.environments.conversation import ChatFormat
from ms_align.environments.episodes import EpisodeRunner
from ms_align.environments.options import EpisodeOptions
from ms_align.environments.pool import ToolPool
from ms_align.environments.tools import schemas_of, target_of
from ms_align.errors import ConfigError, ModelError
from ms_align.generation.responses import Generator, RolloutEngine
from ms_align.generation.routing import RoutedLayers
from ms_align.generation.sampling import token_ids
from ms_align.generation.stops import resolve_tokenizer, with_stops
from ms_align.losses.protocol import Loss
from ms_align.models.folder import folder_of
from ms_align.rewards.named import named_rewards, reward_folders
from ms_align.rewards.scoring import rewards_of
from ms_align.rollouts.algorithm import EpisodeGenerator
from ms_align.rollouts.experience import Experience, RewardScorer
from ms_align.rollouts.generators import rollout_engine_builder
from ms_align.rollouts.generators.policy import PolicyRollouts
from ms_align.rollouts.learner import RolloutLearner
from ms_align.rollouts.options import RolloutOptions
from ms_align.rollouts.prompts import Prompt, prompts_checksum, read_prompts
from ms_align.rollouts.vllm.options import VllmOptions, check_generator, vllm_options
from ms_align.run.initial_weights import model_name, weights_checksum
from ms_align.run.loop import Notice, Result
from ms_align.settings import integer, short_repr, valid_path
from ms_align.tokenizer import HuggingFaceTokenizer, Tokenizer, load_tokenizer
from ms_align.tokenizer_files import TokenizerFiles, check_same_tokenizer, files_of
from ms_align.trainers.base.trainer import Trainer


def _prompts(instance: object, attribute: "Attribute[Any]", value: object) -> None:
    """Check that the value is an iterable of prompts or the path of a file."""
    if isinstance(value, str | os.PathLike) or not isinstance(value, Iterable | None):
        valid_path()(instance, attribute, value)


@frozen(kw_only=True, slots=False)
class OnlineTrainer(RolloutOptions, EpisodeOptions, Trainer):
    """Models and length of training."""

    max_resample_times = 0

    policy_model: Any = field(validator=valid_path(objects=True))
    """Policy model to train: a folder; in Python also a torch.nn.Module or an Engine."""
    reward_model: Any = field(validator=valid_path(multiple=True, objects=True))
    """Reward: a reward model's folder or `module:function`, a list of these, or a table of names
    to these, optionally with weights; in Python also callables and torch.nn.Modules."""
    reference_model: Any = field(default=None, validator=valid_path(optional=True, objects=True))
    """Reference of the KL penalty: a folder, `"adapter_off"` for the policy without its adapters,
    or None for the initial policy; in Python also a module or an Engine."""
    tokenizer: Any = field(default=None, validator=valid_path(optional=True, objects=True))
    """Tokenizer: a folder, a file or `bytes`; in Python also an object with `encode` and `decode`.
    Needed for text prompts; saved with the trained model. Default: the policy's."""
    stop_token_ids: Any = field(default=None, converter=optional(token_ids))
    """Token ids that end a response. Default: the end-of-text tokens of the model."""
    generator: Any = "policy"
    """Rollout engine: `policy` for the policy's own engine, or `vllm` for vLLM servers; in Python
    also any `Generator`."""
    vllm: VllmOptions | None = field(
        default=None,
        converter=vllm_options,
        validator=check_generator,
        metadata={"table": VllmOptions},
    )
    """Servers of `generator = "vllm"`."""
    max_num_seqs: int = field(default=64, validator=integer())
    """Responses generated at the same time."""
    steps: int = field(default=100, validator=integer())
    """Total updates."""
    held_out: Any = field(default=None, validator=_prompts)
    """Held-out prompts for evaluation, in the format of the training prompts."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.check_used()
        if self.generator == "vllm" and self.max_staleness and self.sampling.truncates:
            raise ConfigError(
                "max_staleness > 0 with generator = 'vllm' needs top_k, top_p and min_p at their "
                "defaults, as log-probabilities of truncated distributions cannot be corrected; "
                "remove them or set max_staleness = 0"
            )
        if self.router_replay and (self.has_episodes or not isinstance(self.generator, str)):
            raise ConfigError(
                "router_replay needs responses of one turn from generator = 'policy' or 'vllm'; "
                "remove router_replay, or tools, environment and agent, or your own generator"
            )
        names = ("rollout_rs", "off_policy_mask_threshold", "bypass_mode")
        corrections = [name for name in names if getattr(self, name) not in (None, False)]
        if corrections and self.generator == "policy" and not self.max_staleness:
            raise ConfigError(
                f"{corrections[0]} corrects rollouts from servers or earlier weights, and these "
                "come from the current policy; set max_staleness or generator = 'vllm', or remove "
                f"{corrections[0]}"
            )

    @property
    def max_response_tokens(self) -> int:
        """Maximum length of a response; with tools or an environment, of an episode."""
        if not self.has_episodes:
            return self.max_new_tokens
        return self.max_episode_tokens or 4 * self.max_new_tokens

    @property
    def fixed(self) -> tuple[str, ...]:
        """Settings that cannot change when a run resumes."""
        sizes = ("batch_size", "minibatch_size", "num_generations", "epochs", "max_staleness")
        return ("seed", "lora", *sizes, "value_model")

    def optimize(
        self,
        prompt_dataset: str | Path | Iterable[Any],
        response_dataset: str | Path | Iterable[Any] | None = None,
    ) -> Result:
        """Train on responses to prompts until the end or SIGTERM; resume from any checkpoint.

        Args:
            prompt_dataset: texts, lists of token ids, chats, mappings with a key `prompt`, or the
                path of a JSON, CSV or Parquet file of these.
            response_dataset: optional reference answers, in the order of the prompts. The policy
                is never trained on them; rewards read them as `sample.answer`.

        Returns:
            Result of the run. The trained model and its tokenizer are in `output_dir/model`,
            adapters in `output_dir/adapter`.

        Raises:
            ConfigError: settings contradict each other.
            FolderError: `output_dir` belongs to another run.
            DataError: the dataset is empty, or a prompt or the tokenizer does not match the model.
            RewardError: a reward failed and `on_reward_failure="stop"`.
            NonFiniteError: a weight is infinite or NaN.
            NothingToLearnError: too many rollouts in a row had equal rewards in every group.
        """
        tokenizer = self._tokenizer()
        if self.has_episodes:
            self._check_episodes()
            ChatFormat(tokenizer)
            assert isinstance(tokenizer, HuggingFaceTokenizer)
            tokenizer.tools = schemas_of(self.tools)
        files = files_of(resolve_tokenizer(self.tokenizer, self.policy_model), tokenizer)
        self._check_tokenizers(files)
        sampling = with_stops(self.sampling, self.stop_token_ids, tokenizer, files)
        resolved = evolve(
            self, stop_token_ids=sampling.stop_token_ids, stop_strings=sampling.stop_strings
        )
        prompts = read_prompts(prompt_dataset, tokenizer, response_dataset, chat=self.has_episodes)
        is_file = isinstance(prompt_dataset, str | Path)
        dataset = str(prompt_dataset) if is_file else f"{len(prompts)} prompts"
        return resolved._optimize(prompts, dataset, tokenizer, files)

    def _optimize(
        self,
        prompts: list[Prompt],
        dataset: str,
        tokenizer: Tokenizer | None,
        files: TokenizerFiles | None,
    ) -> Result:
        # For heads and adapters that are created in this process.
        torch.manual_seed(self.seed)
        policy = self.start_engine(self.policy_model, heads=self.heads(), adapted=True)
        learner = self._learner(policy, prompts, tokenizer)
        identity = {
            "model": model_name(self.policy_model),
            "weights": weights_checksum(policy),
            "dataset": dataset,
            "prompts": prompts_checksum(prompts),
        }
        try:
            return self.run(
                learner,
                policy,
                steps=self.steps,
                identity=identity,
                tokenizer=lambda: files,
                notices=self._prompt_notices(learner),
            )
        finally:
            learner.engine.close()
            if learner.episodes is not None:
                learner.episodes.close()

    def _prompt_notices(self, learner: RolloutLearner) -> list[Notice]:
        """Build the notices about the prompts and missing held-out prompts."""
        held_out = len(learner.held_out)
        lengths = [len(prompt.tokens) for prompt in learner.prompts]
        fields = {"prompts": len(lengths), "held_out": held_out, "longest": max(lengths)}
        line = f"{len(lengths)} prompts of up to {max(lengths)} tokens, {held_out} held out"
        notices = [Notice(event="prompts", fields=fields, line=line)]
        if self.eval_every is not None and not held_out:
            notices.append(
                Notice(
                    event="no_held_out",
                    fields={"eval_every": self.eval_every, "lacking": "held_out"},
                    line="warning: nothing is evaluated without held-out prompts; set "
                    "held_out, or remove eval_every",
                )
            )
        return notices

    @abstractmethod
    def loss(self, kl_coeff: float) -> Loss:
        """Build the policy loss; `kl_coeff` is 0 unless the KL penalty is in the loss."""

    @abstractmethod
    def advantages(self, experience: Experience, kl_coeff: float) -> dict[str, Tensor]:
        """Compute the columns that the loss reads, (N, S) each, from a scored rollout.

        `kl_coeff` is 0 unless the KL penalty is in the reward.
        """

    @property
    def learns_from_groups(self) -> bool:
        """True if advantages are relative to the group, so equal rewards in it teach nothing."""
        return False

    def value_loss(self) -> Loss | None:
        """Build the loss of a separate value model, if the algorithm has one."""
        return None

    def heads(self) -> dict[str, int]:
        """Return the width of each extra head of the policy, by name."""
        return {}

    def value_engine(self, policy: Engine) -> Engine | None:
        """Build or return the engine that estimates values; None if the algorithm needs none."""
        return None

    def surrogate(self, kl_coeff: float) -> dict[str, Any]:
        """Return the shared arguments of `PolicyLoss`."""
        names = ("clip_low", "clip_high", "entropy_coeff", "kl_estimator")
        settings = {name: getattr(self, name) for name in names}
        temperature = self.sampling.policy_temperature
        return {**settings, "temperature": temperature, "kl_coeff": kl_coeff}

    def _learner(
        self, policy: Engine, prompts: list[Prompt], tokenizer: Tokenizer | None
    ) -> RolloutLearner:
        _check_vocabulary(tokenizer, policy, "the model")
        rows = self.batch_size // self.num_generations  # prompts per rollout
        if rows % policy.data_ranks:
            raise ConfigError(
                f"the {rows} prompts of a rollout must divide evenly among {policy.data_ranks} "
                "data ranks; change batch_size"
            )
        held_out: list[Prompt] = []
        if self.held_out is not None:
            held_out = read_prompts(
                self.held_out, tokenizer, name="held_out", chat=self.has_episodes
            )
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
            engine=self._rollout_engine(policy, tokenizer),
            episodes=self._episode_runner(policy, tokenizer) if self.has_episodes else None,
            scoring=RewardScorer(
                rewards=rewards,
                tokenizer=tokenizer,
                on_failure=self.on_reward_failure,
                penalty=self.reward_failure_penalty,
            ),
            prompts=prompts,
            held_out=held_out,
        )

    def _check_tokenizers(self, files: TokenizerFiles | None) -> None:
        """Check that tokenizer, reference, value and reward models share the policy's token ids."""
        base = self.base_folder
        name = f"the model {base}"
        if base is not None and self.tokenizer is not None:
            model_files, remedy = files_of(base), "remove `tokenizer`"
            check_same_tokenizer(model_files, name, files, "`tokenizer`", remedy=remedy)
        folders = {
            setting: folder_of(getattr(self, setting, None))
            for setting in ("reference_model", "value_model")
        }
        for setting, folder in folders.items():
            if folder is not None and folder.is_dir():
                remedy = f"use a {setting} of the same model family"
                other, other_name = files_of(folder), f"{setting} {folder}"
                check_same_tokenizer(files, name, other, other_name, remedy=remedy)
        for folder in reward_folders(self.reward_model):
            remedy = (
                "train a reward model with `ms-align reward` from a model with the policy's "
                "tokenizer, or use a function that decodes and scores the text"
            )
            other, other_name = files_of(folder), f"the reward model {folder}"
            check_same_tokenizer(files, name, other, other_name, remedy=remedy)

    def _reference(self, policy: Engine) -> Reference | None:
        # Without a KL penalty no reference is loaded.
        if not self.kl_coeff:
            return None
        reference = self.reference_model
        # Without its adapters, the policy is the initial model, so no second copy is loaded.
        if reference is None and self.lora is not None:
            reference = ADAPTER_OFF
        if reference is None and self.layout is not None:
            reference = self.policy_model  # a sharded model is not copied but loaded a second time
        return reference_of(reference, policy, partial(self.start_engine, trained=False))

    def _check_episodes(self) -> None:
        """Check that an episode has room for one turn."""
        if self.max_response_tokens < self.max_new_tokens:
            raise ConfigError(
                f"max_episode_tokens must be at least max_new_tokens, {self.max_new_tokens}, the "
                f"length of one turn, got {self.max_episode_tokens}; raise it"
            )
        if self.max_staleness:
            raise ConfigError(
                f"max_staleness={self.max_staleness} cannot be combined with tools or an "
                "environment, whose episodes are not generated in the background; set "
                "max_staleness = 0"
            )

    def _episode_runner(self, policy: Engine, tokenizer: Tokenizer | None) -> EpisodeGenerator:
        if self.agent is not None:
            if processes.count() > 1:
                raise ConfigError("agent needs a single process; remove layout")
            return AgentRunner(
                policy,
                ChatFormat(tokenizer),
                ToolPool((), target_of(self.agent, "agent"), self.tool_limits),
                max_episode_tokens=self.max_response_tokens,
            )
        pool: ToolPool | None = None
        if processes.rank() == 0:
            environment = self.environment
            pool = ToolPool(
                [target_of(tool, "tools") for tool in self.tools],
                None if environment is None else target_of(environment, "environment"),
                self.tool_limits,
            )
        return EpisodeRunner(
            policy,
            ChatFormat(tokenizer),
            pool,
            has_tools=bool(self.tools),
            has_environment=self.environment is not None,
            max_tool_calling_iterations=self.max_tool_calling_iterations,
            max_episode_tokens=self.max_response_tokens,
            max_active=self.max_num_seqs * policy.data_ranks,
        )

    def _rollout_engine(self, policy: Engine, tokenizer: Tokenizer | None) -> RolloutEngine:
        if isinstance(self.generator, str):
            return rollout_engine_builder(self.generator)(
                policy,
                max_num_seqs=self.max_num_seqs,
                decode=tokenizer.decode if tokenizer else None,
                vllm=self.vllm,
                folder=self.run_dir,
                max_staleness=self.max_staleness,
                routed_layers=RoutedLayers.of(policy) if self.router_replay else None,
            )
        if not callable(self.generator):
            raise ConfigError(
                "generator must be a name or a callable, got "
                f"{short_repr(self.generator)}; use 'policy'"
            )
        if self.max_staleness:
            raise ConfigError(
                f"max_staleness={self.max_staleness} needs generator = 'policy' or 'vllm', as a "
                "callable reads the weights that are being trained; set max_staleness = 0"
            )
        return PolicyRollouts(cast(Generator, self.generator))

    def _tokenizer(self) -> Tokenizer | None:
        tokenizer = resolve_tokenizer(self.tokenizer, self.policy_model)
        if isinstance(tokenizer, str | Path):
            return load_tokenizer(tokenizer)
        if tokenizer is not None and not (
            hasattr(tokenizer, "encode") and hasattr(tokenizer, "decode")
        ):
            raise ConfigError(
                f"tokenizer must be a folder, a file or an object with encode and decode, got "
                f"{tokenizer!r}; use one of these"
            )
        return cast("Tokenizer | None", tokenizer)


def _check_vocabulary(tokenizer: object, model: object, name: str) -> None:
    """Check that a model has an embedding for every token of the tokenizer, or of the policy."""
    token_count, model_size = (
        getattr(item, "vocabulary_size", None) for item in (tokenizer, model)
    )
    if token_count and model_size and token_count > model_size:
        raise ModelError(
            f"{name} must have the tokenizer's {token_count} tokens, and has {model_size}; use a "
            "model trained with the policy's tokenizer"
        )
