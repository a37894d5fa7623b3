"""Reward functions with TRL's signature in our trainers, and ours in TRL's.

The test against the real TRL needs `MS_TRL_PYTHON`, the Python of an environment with it; `nox -s
trl` makes it.
"""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from ms_align import ExactMatch, RewardError, Sample
from ms_align.rewards.scoring import rewards_of, score
from ms_align.rewards.trl import from_trl, to_trl

PYTHON = os.environ.get("MS_TRL_PYTHON", "")


def sample(response: str, **fields: Any) -> Sample:
    """A sample with this response."""
    return Sample(
        prompt="What?", response=response, prompt_tokens=(1,), response_tokens=(2, 3), **fields
    )


def test_a_function_of_trl_scores_samples() -> None:
    """Columns arrive as lists with None where a prompt lacks them; None counts as 0."""
    calls: list[dict[str, Any]] = []

    def length_reward(prompts: Any, completions: Any, **columns: Any) -> list[float | None]:
        calls.append({"prompts": prompts, **columns})
        return [None if text == "abstain" else float(len(text)) for text in completions]

    samples = [
        sample("four", answer="4", extra={"level": 2}),
        sample("abstain", extra={"topic": "x"}),
    ]
    result = score(rewards_of(from_trl(length_reward)), samples)
    assert result.total.tolist() == [4.0, 0.0]
    assert list(result.parts) == ["length_reward"]
    assert calls == [
        {
            "prompts": ["What?", "What?"],
            "completion_ids": [[2, 3], [2, 3]],
            "level": [2, None],
            "topic": [None, "x"],
            "answer": ["4", None],
        }
    ]


def test_our_reward_is_a_function_of_trl() -> None:
    """Text and chat completions; TRL's own arguments are not columns."""
    function = to_trl(ExactMatch())
    assert function.__name__ == "ExactMatch"
    state = {"trainer_state": object(), "log_extra": print}
    assert function(["q", "q"], ["7", "8"], answer=["7", "7"], **state) == [1.0, 0.0]
    chat = [[{"role": "assistant", "content": text}] for text in ("7", "8")]
    prompts = [[{"role": "user", "content": "q"}]] * 2
    assert function(prompts=prompts, completions=chat, answer=[7, 8]) == [1.0, 1.0]
    tensor = to_trl(lambda samples: torch.tensor([s.extra["level"] for s in samples]))
    assert tensor(["q"], ["a"], level=[3]) == [3.0]
    with pytest.raises(RewardError, match="must be text or messages, got int"):
        function([1], [2])


def test_a_round_trip_is_the_identity() -> None:
    """TRL's function through ours and back gives the same numbers for the same columns."""

    def by_answer(prompts: Any, completions: Any, answer: Any, **_: Any) -> list[float]:
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    again = to_trl(from_trl(by_answer))
    assert again(["q"] * 3, ["a", "b", "c"], answer=["a", "x", "c"]) == [1.0, 0.0, 1.0]


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="needs TRL; run nox -s trl")
def test_trls_grpo_trains_with_our_reward_and_packed_batches(tmp_path: Path) -> None:
    """The real `trl.GRPOTrainer` calls our reward, and the mean that it logs is ours."""
    script = Path(__file__).with_name("trl_process.py")
    result = subprocess.run(
        [PYTHON, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "equal rewards in 3 steps" in result.stdout
