"""Reward interface: scoring responses with functions and models.

A reward is any Python callable that takes samples and returns one number for each, or a
torch.nn.Module that maps tokens to scores. Several rewards are added up. Results are validated,
and errors name the sample.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from attrs import field, frozen
from torch import Tensor, nn

from ms_align.entry import one_line
from ms_align.errors import ConfigError, RewardError

Failure = Literal["stop", "skip", "penalize"]
"""Handling of a failed reward: stop the run, skip the sample, or assign a fixed reward."""


@frozen(kw_only=True)
class Sample:
    """Prompt and response, as reward functions receive them."""

    prompt: str
    response: str
    """Decoded response; empty without a tokenizer."""
    prompt_tokens: tuple[int, ...]
    response_tokens: tuple[int, ...]
    answer: str | None = None
    """Reference answer, from the response dataset or the prompt's column `answer`."""
    stopped: bool = True
    """True if a stop token or string ended the response, False if it was cut at its length."""
    extra: Mapping[str, Any] = field(factory=dict)
    """Other columns of the prompt."""
    messages: Sequence[Mapping[str, Any]] = ()
    """With tools or an environment: the entire conversation, and `response` is its last turn."""
    environment_reward: float | None = None
    """Sum of the environment's rewards; None without an environment."""


class Reward(Protocol):
    """Reward function: any callable with this signature."""

    def __call__(self, samples: Sequence[Sample], /) -> Sequence[float] | Tensor:
        """Return one number per sample."""


@frozen(kw_only=True)
class BatchRewards:
    """Scores of a batch of samples."""

    total: Tensor
    """(N,) float32; NaN for skipped samples."""
    parts: Mapping[str, Tensor]
    """(N,) float32 per reward, by name, before weighting."""
    failures: tuple[str, ...]
    """Messages, one per sample with a failed reward."""


class ModuleReward:
    """Reward computed by a torch.nn.Module.

    The module is called with tokens (B, S) int64, prompt and response, and with `lengths` (B,) if
    its forward accepts it. Rows are padded on the right with `config.pad_token_id`, or with 0 if
    the setting is missing; with a pad_token_id of None, rows are scored one at a time. The module
    returns scores (B,) or (B, 1); or (B, S) or (B, S, 1), and the score at the last token is used.
    It may also return an object with such `logits`, like transformers' classifiers, which are
    called with `attention_mask`.

    Args:
        module: runs in evaluation mode and without gradient.
        batch_size: samples per forward pass.
    """

    def __init__(self, module: nn.Module, *, batch_size: int = 32) -> None:
        self.module = module
        self.batch_size = batch_size
        # torch.compile hides the signature; `_orig_mod` is the original module.
        names = inspect.signature(getattr(module, "_orig_mod", module).forward).parameters
        self.vocabulary_size = _vocabulary_of(module)
        """Vocabulary size of the module; None if unknown."""
        self._lengths = "lengths" in names
        self._mask = "attention_mask" in names
        self._pad = getattr(getattr(module, "config", None), "pad_token_id", 0)
        # Without a padding token the module cannot tell padding from text.
        if self._pad is None and not self._lengths:
            self.batch_size = 1

    @torch.no_grad()
    def __call__(self, samples: Sequence[Sample], /) -> Tensor:
        """Return the score of each sample, (N,) float32 on the CPU."""
        # A module may be shared with the caller; its mode is restored.
        training = self.module.training
        self.module.eval()
        parts = [
            self._score(samples[start : start + self.batch_size])
            for start in range(0, len(samples), self.batch_size)
        ]
        self.module.train(training)
        return torch.cat(parts).float().cpu()

    def _score(self, samples: Sequence[Sample]) -> Tensor:
        rows = [[*sample.prompt_tokens, *sample.response_tokens] for sample in samples]
        lengths = torch.tensor([len(row) for row in rows])
        # Without a padding token there is a single row, or the module knows the lengths.
        tokens = torch.full((len(rows), int(lengths.max())), self._pad or 0)  # (B, S)
        for row, values in zip(tokens, rows, strict=True):
            row[: len(values)] = torch.tensor(values)
        weight = next(self.module.parameters(), None)
        device = weight.device if weight is not None else torch.device("cpu")
        arguments: dict[str, Tensor] = {}
        if self._lengths:
            arguments["lengths"] = lengths.to(device)
        if self._mask:
            mask = torch.arange(tokens.shape[1]) < lengths[:, None]
            arguments["attention_mask"] = mask.long().to(device)
        output = self.module(tokens.to(device), **arguments)
        scores: Tensor = getattr(output, "logits", output)
        # Scores of all positions: take the one at the last token.
        if scores.ndim == 3 or (scores.ndim == 2 and scores.shape == tokens.shape):
            scores = scores[torch.arange(len(rows)), lengths.to(scores.device) - 1]
        return scores.reshape(len(rows), -1)[:, 0]


def _vocabulary_of(module: nn.Module) -> int | None:
    """Read the vocabulary size from a module or its configuration."""
    size = getattr(module, "vocabulary_size", None)
    if size is None:
        size = getattr(getattr(module, "config", None), "vocab_size", None)
    return size if isinstance(size, int) else None


def rewards_of(
    rewards: Reward | nn.Module | Mapping[str, Any] | Sequence[Any],
) -> dict[str, tuple[Reward, float]]:
    """Return rewards by name, each with its weight.

    Args:
        rewards: a callable or module; a sequence of these; or a mapping of names to these or to
            pairs (reward, weight).

    Raises:
        ConfigError: the setting is empty, or a reward is neither callable nor a module.
    """
    if isinstance(rewards, Mapping):
        items = list(rewards.items())
    elif isinstance(rewards, Sequence) and not isinstance(rewards, str):
        items = [(_name(item, index), item) for index, item in enumerate(rewards)]
    else:
        items = [(_name(rewards, 0), rewards)]
    weighted: dict[str, tuple[Reward, float]] = {}
    for name, item in items:
        reward, weight = item if isinstance(item, tuple) else (item, 1.0)
        if isinstance(reward, nn.Module):
            reward = ModuleReward(reward)
        if not callable(reward):
            raise ConfigError(
                f"reward {name!r} must be a callable or a torch module, got "
                f"{type(reward).__name__}; pass one"
            )
        weighted[name if name not in weighted else f"{name}_{len(weighted)}"] = (
            reward,
            float(weight),
        )
    if not weighted:
        raise ConfigError("reward_model has no rewards; add at least one")
    return weighted


def _name(reward: object, index: int) -> str:
    name = getattr(reward, "__name__", type(reward).__name__)
    return f"reward_{index}" if name == "<lambda>" else str(name)


def score(
    rewards: Mapping[str, tuple[Reward, float]],
    samples: Sequence[Sample],
    *,
    on_failure: Failure = "stop",
    penalty: float = -1.0,
) -> BatchRewards:
    """Return the weighted sum of rewards for each sample.

    Args:
        rewards: result of `rewards_of`.
        samples: samples to score.
        on_failure: `stop` raises; `skip` scores the sample as NaN, so that it is skipped;
            `penalize` scores it as `penalty`.
        penalty: total score of a sample with a failed reward.

    Raises:
        RewardError: a reward raised, or returned NaN, an infinity or the wrong number of scores.
    """
    parts: dict[str, Tensor] = {}
    failures: dict[int, str] = {}
    total = torch.zeros(len(samples))
    for name, (reward, weight) in rewards.items():
        values, failed = _call(name, reward, samples, per_sample=on_failure != "stop")
        parts[name] = values
        failures |= failed
        total = total + weight * values
    if failures and on_failure == "stop":
        raise RewardError(next(iter(failures.values())))
    # A failed reward replaces the total, regardless of the other rewards.
    for index in failures:
        total[index] = float("nan") if on_failure == "skip" else penalty
    return BatchRewards(total=total, parts=parts, failures=tuple(failures.values()))


def _call(
    name: str, reward: Reward, samples: Sequence[Sample], *, per_sample: bool
) -> tuple[Tensor, dict[int, str]]:
    """Call a reward; return its values (N,) and the messages of failed samples by index.

    A reward that raises on the batch is called for each sample, to find the one it fails on.
    """
    try:
        result = reward(samples)
    except Exception as error:  # reward functions may raise anything
        if len(samples) == 1:
            return torch.zeros(1), {
                0: _failure_message(name, samples[0], 0, _exception_text(error))
            }
        return _call_per_sample(name, reward, samples, error, keep_going=per_sample)
    values = _to_tensor(name, result, len(samples))
    failed = {
        index: _failure_message(name, samples[index], index, f"returned {values[index].item()}")
        for index in (~values.isfinite()).nonzero()[:, 0].tolist()
    }
    return values, failed


def _call_per_sample(
    name: str, reward: Reward, samples: Sequence[Sample], error: Exception, *, keep_going: bool
) -> tuple[Tensor, dict[int, str]]:
    values, failed = torch.zeros(len(samples)), {}
    for index, sample in enumerate(samples):
        value, failure = _call(name, reward, [sample], per_sample=keep_going)
        values[index] = value[0]
        if failure:
            # The call had one sample, so its message has index 0.
            failed[index] = failure[0].replace("sample 0", f"sample {index}", 1)
            if not keep_going:
                break
    if not failed and not keep_going:
        raise RewardError(
            f"reward {name!r} {_exception_text(error)} on {len(samples)} samples together, but "
            "not on any single one"
        ) from error
    return values, failed


def _to_tensor(name: str, result: Any, count: int) -> Tensor:
    try:
        values = torch.as_tensor(result, dtype=torch.float32).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise RewardError(
            f"reward {name!r} must return one number per sample, got {_shorten(result)} for "
            f"{count} samples; fix the function"
        ) from error
    if values.shape != (count,):
        raise RewardError(
            f"reward {name!r} must return one number per sample, got shape {tuple(values.shape)} "
            f"for {count} samples; fix the function"
        )
    return values


def _shorten(result: Any) -> str:
    text = " ".join(repr(result).split())
    return text if len(text) <= 60 else text[:57] + "..."


def _exception_text(error: Exception) -> str:
    # HTTP clients put URLs with API keys into their messages, and this goes into events.jsonl.
    text = one_line(str(error))
    return f"raised {type(error).__name__}: {text[:120]}"


def _failure_message(name: str, sample: Sample, index: int, problem: str) -> str:
    prompt = sample.prompt or str(list(sample.prompt_tokens))
    response = sample.response if sample.prompt else str(list(sample.response_tokens))
    return (
        f"reward {name!r} {problem}, on sample {index}: prompt {prompt[-60:]!r}, response "
        f"{response[:60]!r}; fix it, or set on_reward_failure to 'skip' or 'penalize'"
    )
