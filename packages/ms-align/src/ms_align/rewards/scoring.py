"""Rewards: anything that gives each response a score.

A reward is any Python callable that takes samples and gives a number for each, or a
torch.nn.Module that maps tokens to scores; several are added up. What it gives is checked, and a
sample that it fails on is named.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from attrs import field, frozen
from torch import Tensor, nn

from ms_align.errors import ConfigError, RewardError
from ms_align.secret_text import without_secrets

Failure = Literal["stop", "skip", "penalise"]
"""What a failing reward does: end the run, leave the sample out, or give it a fixed reward."""


@frozen(kw_only=True)
class Sample:
    """A prompt, a response to it, and what is known of them."""

    prompt: str
    response: str
    """Empty where there is no tokenizer to decode with."""
    prompt_tokens: tuple[int, ...]
    response_tokens: tuple[int, ...]
    answer: str | None = None
    """The known answer, from the response dataset or the prompt's own column `answer`."""
    stopped: bool = True
    """Whether a stop token or string ended it, not its length."""
    extra: Mapping[str, Any] = field(factory=dict)
    """The prompt's other columns."""


class Reward(Protocol):
    """Says how good responses are; any callable of this shape."""

    def __call__(self, samples: Sequence[Sample], /) -> Sequence[float] | Tensor:
        """Return a number for each sample."""


@frozen(kw_only=True)
class Scores:
    """What rewards gave for some samples."""

    total: Tensor
    """(N,) float32; NaN where a sample is to be left out."""
    parts: Mapping[str, Tensor]
    """(N,) float32 of each reward, by name, before weights."""
    failures: tuple[str, ...]
    """A line for each sample that a reward failed on."""


class ModuleReward:
    """A torch.nn.Module as a reward.

    The module is called with tokens (B, S) int64, prompt and response, and `lengths` (B,) if its
    forward takes it; padded on the right with its `config.pad_token_id`, or 0 where there is no
    such setting; where that is None, row by row. It gives (B,), (B, 1), or (B, S) or (B, S, 1) of
    which the score at the last token counts; or an object with such `logits`, as transformers'
    classifiers do, which are called with `attention_mask`.

    Args:
        module: runs in evaluation mode and without gradient.
        batch_size: samples at once.
    """

    def __init__(self, module: nn.Module, *, batch_size: int = 32) -> None:
        self.module = module
        self.batch_size = batch_size
        names = inspect.signature(getattr(module, "_orig_mod", module).forward).parameters
        self.vocabulary_size = _vocabulary_of(module)
        """Tokens that the module knows; None where it does not say."""
        self._lengths = "lengths" in names
        self._mask = "attention_mask" in names
        self._pad = getattr(getattr(module, "config", None), "pad_token_id", 0)
        if self._pad is None and not self._lengths:
            self.batch_size = 1

    @torch.no_grad()
    def __call__(self, samples: Sequence[Sample], /) -> Tensor:
        """Score each sample, (N,) float32 on the CPU."""
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
        tokens = torch.full((len(rows), int(lengths.max())), self._pad or 0)
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
        made = self.module(tokens.to(device), **arguments)
        scores: Tensor = getattr(made, "logits", made)
        if scores.ndim == 3 or (scores.ndim == 2 and scores.shape == tokens.shape):
            scores = scores[torch.arange(len(rows)), lengths.to(scores.device) - 1]
        return scores.reshape(len(rows), -1)[:, 0]


def _vocabulary_of(module: nn.Module) -> int | None:
    """Find the number of tokens that a module's configuration names."""
    size = getattr(module, "vocabulary_size", None)
    if size is None:
        size = getattr(getattr(module, "config", None), "vocab_size", None)
    return size if isinstance(size, int) else None


def rewards_of(
    given: Reward | nn.Module | Mapping[str, Any] | Sequence[Any],
) -> dict[str, tuple[Reward, float]]:
    """Name rewards, one or several, and give each its weight.

    Args:
        given: a callable or module; a sequence of them, which are added up; or a mapping of names
            to them, or to pairs (reward, weight).

    Raises:
        ConfigError: one is neither callable nor a module, or there is none.
    """
    if isinstance(given, Mapping):
        items = list(given.items())
    elif isinstance(given, Sequence) and not isinstance(given, str):
        items = [(_name(each, index), each) for index, each in enumerate(given)]
    else:
        items = [(_name(given, 0), given)]
    found: dict[str, tuple[Reward, float]] = {}
    for name, each in items:
        reward, weight = each if isinstance(each, tuple) else (each, 1.0)
        if isinstance(reward, nn.Module):
            reward = ModuleReward(reward)
        if not callable(reward):
            raise ConfigError(
                f"reward {name!r} is {type(reward).__name__}; give a callable or a torch module"
            )
        found[name if name not in found else f"{name}_{len(found)}"] = (reward, float(weight))
    if not found:
        raise ConfigError("there is no reward; give at least one")
    return found


def _name(reward: object, index: int) -> str:
    name = getattr(reward, "__name__", type(reward).__name__)
    return f"reward_{index}" if name == "<lambda>" else str(name)


def score(
    rewards: Mapping[str, tuple[Reward, float]],
    samples: Sequence[Sample],
    *,
    on_failure: Failure = "stop",
    penalty: float = -1.0,
) -> Scores:
    """Compute the weighted sum of rewards for each sample.

    Args:
        rewards: as `rewards_of` gives them.
        samples: what to judge.
        on_failure: `stop` raises; `skip` gives NaN, and the sample is left out; `penalise` gives
            it `penalty` in all.
        penalty: see there.

    Raises:
        RewardError: a reward raised, or gave NaN, an infinity, or more or fewer numbers.
    """
    parts: dict[str, Tensor] = {}
    failures: dict[int, str] = {}
    total = torch.zeros(len(samples))
    for name, (reward, weight) in rewards.items():
        values, failed = _call(name, reward, samples, one_by_one=on_failure != "stop")
        parts[name] = values
        failures |= failed
        total = total + weight * values
    if failures and on_failure == "stop":
        raise RewardError(next(iter(failures.values())))
    for index in failures:
        total[index] = float("nan") if on_failure == "skip" else penalty
    return Scores(total=total, parts=parts, failures=tuple(failures.values()))


def _call(
    name: str, reward: Reward, samples: Sequence[Sample], *, one_by_one: bool
) -> tuple[Tensor, dict[int, str]]:
    """Call a reward; return its values (N,), and a line for each sample without one.

    A reward that raises is called again for each sample alone, to learn which it was.
    """
    try:
        given = reward(samples)
    except Exception as error:  # a user's code may raise anything
        if len(samples) == 1:
            return torch.zeros(1), {0: _line(name, samples[0], 0, _raised(error))}
        return _each(name, reward, samples, error, go_on=one_by_one)
    values = _numbers(name, given, len(samples))
    failed = {
        index: _line(name, samples[index], index, f"gave {values[index].item()}")
        for index in (~values.isfinite()).nonzero()[:, 0].tolist()
    }
    return values, failed


def _each(
    name: str, reward: Reward, samples: Sequence[Sample], error: Exception, *, go_on: bool
) -> tuple[Tensor, dict[int, str]]:
    values, failed = torch.zeros(len(samples)), {}
    for index, sample in enumerate(samples):
        value, failure = _call(name, reward, [sample], one_by_one=go_on)
        values[index] = value[0]
        if failure:
            failed[index] = failure[0].replace("sample 0", f"sample {index}", 1)
            if not go_on:
                break
    if not failed and not go_on:
        raise RewardError(
            f"reward {name!r} {_raised(error)} on {len(samples)} samples together, on none alone"
        ) from error
    return values, failed


def _numbers(name: str, given: Any, count: int) -> Tensor:
    try:
        values = torch.as_tensor(given, dtype=torch.float32).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise RewardError(
            f"reward {name!r} gave {_short(given)} for {count} samples; give one number a sample"
        ) from error
    if values.shape != (count,):
        raise RewardError(
            f"reward {name!r} gave numbers of shape {tuple(values.shape)} for {count} samples; "
            "give one a sample"
        )
    return values


def _short(given: Any) -> str:
    text = " ".join(repr(given).split())
    return text if len(text) <= 60 else text[:57] + "..."


def _raised(error: Exception) -> str:
    # Errors of HTTP clients print the address with its key; this line goes into events.jsonl.
    text = without_secrets(" ".join(str(error).split()))
    return f"raised {type(error).__name__}: {text[:120]}"


def _line(name: str, sample: Sample, index: int, what: str) -> str:
    prompt = sample.prompt or str(list(sample.prompt_tokens))
    response = sample.response if sample.prompt else str(list(sample.response_tokens))
    return (
        f"reward {name!r} {what}, on sample {index}: prompt {prompt[-60:]!r}, response "
        f"{response[:60]!r}; mend it, or set on_reward_failure to 'skip' or 'penalise'"
    )
