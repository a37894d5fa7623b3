"""Tasks of reasoning-gym; `nox -s environments` runs these tests with the real package."""

from pathlib import Path
from typing import Any

import pytest

from ms_align import ConfigError, GRPOTrainer, RewardError, Sample
from ms_align.rewards.reasoning_gym import from_reasoning_gym

from .test_online import events, settings


def sample(response: str, row: dict[str, Any]) -> Sample:
    """Return a response to a row."""
    extra = {name: value for name, value in row.items() if name not in ("prompt", "answer")}
    return Sample(
        prompt=row["prompt"], response=response, prompt_tokens=(), response_tokens=(), extra=extra
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chain_sum", "leg_counting", "countdown", "knights_knaves"])
def test_correct_answers_score_1_and_others_less(name: str) -> None:
    """The task's own rules score the response to each of its questions."""
    pytest.importorskip("reasoning_gym")
    task = from_reasoning_gym(name, size=20, seed=3)
    rows = list(task)
    assert len(rows) == len(task) == 20
    assert rows == list(from_reasoning_gym(name, size=20, seed=3))
    assert task([sample(f" {row['answer']}\n", row) for row in rows]) == [1.0] * 20
    assert max(task([sample("no idea", row) for row in rows])) < 0.5


@pytest.mark.slow
def test_a_trainer_takes_a_task_as_prompts_and_reward(tmp_path: Path) -> None:
    """Two updates of GRPO."""
    pytest.importorskip("reasoning_gym")
    task = from_reasoning_gym("chain_sum", size=8, min_terms=2, max_terms=2)
    options = settings(tmp_path, reward_model=task, num_generations=4)
    assert GRPOTrainer(**options).optimize(task).finished
    assert len(events(tmp_path, "rollout")) == 2


@pytest.mark.slow
def test_unknown_tasks_settings_and_prompts_are_one_line() -> None:
    """A name or setting that does not exist, and a prompt of another dataset."""
    pytest.importorskip("reasoning_gym")
    for name, config in (("no_such_task", {}), ("chain_sum", {"terms": 2})):
        with pytest.raises(ConfigError, match=r"must be a dataset of reasoning-gym") as error:
            from_reasoning_gym(name, **config)
        assert "\n" not in str(error.value)
    task = from_reasoning_gym("chain_sum", size=3)
    with pytest.raises(RewardError, match="task_index must be below 3, got None"):
        task([sample("1", {"prompt": "1 + 0?"})])
