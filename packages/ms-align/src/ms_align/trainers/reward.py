"""Reward models: a score at the last token of an answer, higher for the chosen one."""

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
from ms_align.trainers.frame.offline import TrainingData
from ms_align.trainers.frame.pairs import PairLearner, PairTrainer

HEAD = "score"


@frozen(kw_only=True, slots=False)  # the trainer inherits from more than one
class RewardOptions:
    """A reward model's own settings."""

    margin_scale: float = field(default=1.0, validator=number())
    """Factor of the data's margins; 0 leaves them out."""
    centring: float = field(default=0.01, validator=number())
    """Weight of the square of a pair's sum of scores; keeps scores around 0."""


@frozen(kw_only=True, slots=False)
class RewardTrainer(RewardOptions, PairTrainer):
    """Train a reward model on preference pairs.

    `RewardTrainer(model=model, steps=100).train(dataset).model` is a `RewardModel`, which PPO
    takes as its reward, as it takes the folder `output_dir/model`. A `RewardModel` goes on.

    Raises:
        ConfigError: a setting is of the wrong kind or out of range, or asks for adapters or a
            layout: a reward model is trained whole and in one process.
    """

    algorithm = "reward"

    alone_remedy = "remove it: reward models train in one process"

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.layout is not None or self.lora is not None:
            raise ConfigError(
                "reward models train in one process, without adapters; remove layout and lora"
            )

    def engine(self) -> LocalEngine:
        """Build the engine of the model with a head for scores."""
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
        begun = model if isinstance(model, RewardModel) else None
        engine = LocalEngine(
            begun.body if begun else model,
            self.part(OptimizerOptions),
            heads={HEAD: 1},
            head_offsets=begun is not None and begun.head.bias is not None,
            microbatch_size=self.microbatch_size,
        )
        if begun is not None:
            engine.heads[HEAD].load_state_dict(begun.head.state_dict())
        return engine

    def learner(self, engine: Engine, data: TrainingData, ends: TextEnds) -> "RewardLearner":
        """Build what learns from the pairs."""
        return RewardLearner(engine, data, ends, self)

    def write(self, engine: Engine, tokenizer: TokenizerFiles | None) -> None:
        """Write the reward model, which PPO takes by its folder."""
        check_finite(engine)
        self.trained(engine).save(
            self.place / "model", tokenizer, base=self.base_folder, dtype=self.dtype
        )

    def result_path(self, engine: Engine) -> Path:
        """Return the path of what `write` writes last."""
        return self.place / "model" / HEAD_FILE

    def trained(self, engine: Engine) -> RewardModel:
        """Return the reward model as it stands."""
        local = cast(LocalEngine, engine)
        return RewardModel(local.module, cast(nn.Linear, local.heads[HEAD]))


class RewardLearner(PairLearner):
    """Learns scores by which of two answers was chosen."""

    def __init__(
        self, engine: Engine, data: TrainingData, ends: TextEnds, options: RewardOptions
    ) -> None:
        super().__init__(engine, data, ends)
        self.options = options

    def loss(self) -> PairwiseLoss:
        """Build the mean pairwise loss."""
        return PairwiseLoss(
            margin_scale=self.options.margin_scale, centring=self.options.centring, head=HEAD
        )

    def judge(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Compute the pairwise loss without margin and centring, and the gap of the scores."""
        scores = self.engine.evaluate(batch, _scores).cpu().view(-1, 2)
        return pairwise_loss(*scores.T), scores[:, 0] - scores[:, 1]


def _scores(output: Output, batch: Batch) -> Tensor:
    return row_scores(output, batch, HEAD)
