"""Prompts and rewards from reasoning-gym."""

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

from ms_align.errors import ConfigError, RewardError
from ms_align.rewards.scoring import Sample

__all__ = ["ReasoningTask", "from_reasoning_gym"]


class ReasoningTask:
    """Questions of a reasoning-gym dataset, and the reward that scores their answers.

    Iterating yields the prompts; pass the task as `reward_model`.

    Args:
        dataset: reasoning-gym dataset.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield rows with `prompt`, `task_index` and, if it is unique, `answer`."""
        for index in range(len(self)):
            entry = self.dataset[index]
            row = {"prompt": entry["question"], "task_index": index}
            yield row if entry["answer"] is None else {**row, "answer": str(entry["answer"])}

    def __call__(self, samples: Sequence[Sample], /) -> list[float]:
        """Score each response from 0 to 1 with the task's own rules.

        Raises:
            RewardError: a sample's prompt is not from this task.
        """
        scores = []
        for sample in samples:
            index = sample.extra.get("task_index")
            if not isinstance(index, int) or not 0 <= index < len(self):
                raise RewardError(
                    f"task_index must be below {len(self)}, got {index!r}; train on the rows of "
                    "this task"
                )
            # The dataset is deterministic, so this is the entry of the sample's prompt.
            score = self.dataset.score_answer(sample.response.strip(), self.dataset[index])
            scores.append(float(score))
        return scores


def from_reasoning_gym(
    name: str, *, size: int = 1000, seed: int = 0, **config: Any
) -> ReasoningTask:
    """Create a reasoning-gym task.

    Args:
        name: name of a dataset, such as `"chain_sum"`.
        size: number of questions.
        seed: seed of the questions.
        config: other settings of the dataset, such as `min_terms=2`.

    Raises:
        ConfigError: reasoning-gym is not installed, has no such dataset, or rejects a setting.
    """
    try:
        gym = importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise ConfigError(
            "from_reasoning_gym needs reasoning-gym; install it with `pip install reasoning-gym`"
        ) from error
    try:
        dataset = gym.create_dataset(name, size=size, seed=seed, **config)
        dataset[0]  # some settings are only checked by the first question
    except (ValueError, TypeError, AssertionError) as error:
        problem = " ".join(str(error).split())
        raise ConfigError(
            f"{name!r} must be a dataset of reasoning-gym with valid settings: {problem}; "
            "see the gallery in its documentation"
        ) from error
    return ReasoningTask(dataset)
