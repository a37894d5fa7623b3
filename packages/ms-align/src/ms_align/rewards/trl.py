"""Conversion of reward functions from and to TRL.

TRL calls `reward(prompts=..., completions=..., **columns)` with a list per column of the dataset
and expects one number per completion; ours take `Sample`s. `from_trl` converts TRL's functions to
rewards for GRPO, PPO and RLOO here; `to_trl` converts ours for TRL's trainers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ms_align.errors import RewardError
from ms_align.rewards.scoring import Reward, Sample

__all__ = ["from_trl", "to_trl"]

TRLReward = Callable[..., Sequence[float | None]]


def from_trl(function: TRLReward) -> Reward:
    """Return a reward that calls a function with TRL's signature.

    The function gets `prompts`, `completions`, `completion_ids` and each column of the prompts
    (including `answer`) as a list. A score of None, TRL's way to abstain, counts as 0.

    Args:
        function: `function(prompts, completions, **columns) -> list[float | None]`.
    """

    def reward(samples: Sequence[Sample], /) -> list[float]:
        # Prompts without the column get None, as in a dataset.
        names = list(dict.fromkeys(name for sample in samples for name in sample.extra))
        columns: dict[str, list[Any]] = {
            name: [sample.extra.get(name) for sample in samples] for name in names
        }
        if any(sample.answer is not None for sample in samples):
            columns["answer"] = [sample.answer for sample in samples]
        scores = function(
            prompts=[sample.prompt for sample in samples],
            completions=[sample.response for sample in samples],
            completion_ids=[list(sample.response_tokens) for sample in samples],
            **columns,
        )
        return [0.0 if score is None else float(score) for score in scores]

    reward.__name__ = getattr(function, "__name__", "reward")
    return reward


def to_trl(reward: Reward) -> Callable[..., list[float]]:
    """Return a function for `reward_funcs` of TRL's trainers.

    Prompts and completions may be text or chat messages; the last message is the response. The
    column `answer` becomes `Sample.answer`, and all other columns `Sample.extra`.

    Args:
        reward: callable of samples, such as `ExactMatch()` or your own.
    """

    def function(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        token_ids = columns.pop("completion_ids", None) or [()] * len(completions)
        prompt_ids = columns.pop("prompt_ids", None) or [()] * len(prompts)
        # TRL also passes its own state, which is not a list with an entry per completion.
        rows = {
            name: values
            for name, values in columns.items()
            if isinstance(values, list) and len(values) == len(completions)
        }
        answers = rows.pop("answer", [None] * len(completions))
        samples = [
            Sample(
                prompt=_text(prompt),
                response=_text(completion),
                prompt_tokens=tuple(prompt_ids[index]),
                response_tokens=tuple(token_ids[index]),
                answer=None if answers[index] is None else str(answers[index]),
                extra={name: values[index] for name, values in rows.items()},
            )
            for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
        ]
        scores = reward(samples)
        return [float(s) for s in (scores.tolist() if isinstance(scores, Tensor) else scores)]

    function.__name__ = getattr(reward, "__name__", type(reward).__name__)
    return function


def _text(messages: Any) -> str:
    """Return text, or the text of the last message of a conversation."""
    if isinstance(messages, str):
        return messages
    if isinstance(messages, list) and messages and isinstance(messages[-1], Mapping):
        content = messages[-1].get("content")
        if isinstance(content, str):
            return content
        if isinstance(content, list):  # parts of a multimodal message
            return "".join(str(part.get("text", "")) for part in content)
    raise RewardError(
        f"a prompt or completion must be text or messages, got {type(messages).__name__}; use the"
        " columns of TRL's dataset formats"
    )
