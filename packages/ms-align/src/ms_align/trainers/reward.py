"""Reward models: a scalar score at the last token, trained on preference pairs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from attrs import field, frozen
from torch import Tensor, nn

from ms_align.engines.assembly import open_model
from ms_align.engines.local import LocalEngine
from ms_align.engines.optimizer import OptimizerOptions
from ms_align.engines.protocol import Engine
from ms_align.errors import ConfigError
from ms_align.losses.pairwise import PairwiseLoss, pairwise_loss, row_scores
from ms_align.losses.protocol import Batch, Output
from ms_align.models.reward_model import HEAD_FILE, RewardModel
from ms_align.run.saving import check_finite
from ms_align.settings import number
from ms_align.streams.text_ends import TextEnds
from ms_align.tokenizer_files import TokenizerFiles
from ms_align.trainers.base.offline import TrainingData
from ms_align.trainers.base.pairs import PairLearner, PairTrainer

HEAD = "score"


@frozen(kw_only=True, slots=False)  # the trainer inherits from more than one
class RewardOptions:
    """Settings of reward model training."""

    margin_scale: float = field(default=1.0, validator=number())
    """Factor for the margins in the dataset; 0 ignores them."""
    center_rewards_coefficient: float = field(default=0.01, validator=number())
    """Weight of the squared sum of a pair's scores, which keeps scores centered around 0."""


@frozen(kw_only=True, slots=False)
class RewardTrainer(RewardOptions, PairTrainer):
    """Train a reward model on preference pairs.

    `RewardTrainer(model=model, steps=100).train(dataset).model` is a `RewardModel`, which PPO
    accepts as its reward, as is the folder `output_dir/model`. Training can also start from a
    `RewardModel`.

    Raises:
        ConfigError: a setting has the wrong type or is out of range, or adapters or a layout are
            set: reward models are trained in full and in one process.
    """

    algorithm = "reward"

    single_process_remedy = "remove it: reward models train in one process"

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.layout is not None or self.lora is not None:
            raise ConfigError(
                "reward models train in one process, without adapters; remove layout and lora"
            )

    def engine(self) -> LocalEngine:
        """Build the engine of the model with a score head."""
        model = (
            open_model(self.model, device=self.device)
            if isinstance(self.model, str | Path)
            else self.model
        )
        if not isinstance(model, nn.Module):
            raise ConfigError(
                "reward models train in one process: model must be a torch.nn.Module or a folder,"
                f" got {type(model).__name__}; pass one of these"
            )
        reward_model = model if isinstance(model, RewardModel) else None
        engine = LocalEngine(
            reward_model.body if reward_model else model,
            self.subset(OptimizerOptions),
            heads={HEAD: 1},
            # A new head has no bias: a constant cancels in the difference of two scores.
            head_bias=reward_model is not None and reward_model.head.bias is not None,
            microbatch_size=self.microbatch_size,
        )
        if reward_model is not None:
            # Continue with the trained head instead of a zero one.
            engine.heads[HEAD].load_state_dict(reward_model.head.state_dict())
        return engine

    def learner(self, engine: Engine, data: TrainingData, ends: TextEnds) -> "RewardLearner":
        """Build the reward learner."""
        return RewardLearner(engine, data, ends, self)

    def write(self, engine: Engine, tokenizer: TokenizerFiles | None) -> None:
        """Write the reward model to `output_dir/model`."""
        check_finite(engine)
        self.trained(engine).save(
            self.run_dir / "model", tokenizer, base=self.base_folder, dtype=self.dtype
        )

    def result_path(self, engine: Engine) -> Path:
        """Return the file that `write` creates last."""
        return self.run_dir / "model" / HEAD_FILE

    def trained(self, engine: Engine) -> RewardModel:
        """Return the reward model in its current state."""
        local = cast(LocalEngine, engine)
        return RewardModel(local.module, cast(nn.Linear, local.heads[HEAD]))


class RewardLearner(PairLearner):
    """Learns scores from preference pairs."""

    def __init__(
        self, engine: Engine, data: TrainingData, ends: TextEnds, options: RewardOptions
    ) -> None:
        super().__init__(engine, data, ends)
        self.options = options

    def loss(self) -> PairwiseLoss:
        """Return the loss of the next update."""
        return PairwiseLoss(
            margin_scale=self.options.margin_scale,
            center_rewards_coefficient=self.options.center_rewards_coefficient,
            head=HEAD,
        )

    def pair_losses(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the pairwise loss without margin and centering, and the score gap, (P,) each."""
        scores = self.engine.evaluate(batch, _scores).cpu().view(-1, 2)
        return pairwise_loss(*scores.T), scores[:, 0] - scores[:, 1]


def _scores(output: Output, batch: Batch) -> Tensor:
    return row_scores(output, batch, HEAD)
