"""Bias of each correction for rollouts that another model sampled, by enumeration.

    python packages/ms-align/benchmarks/corrections.py

Prints a table of the relative distance between the expected gradient of the trainers' policy loss
and the exact policy gradient. A policy is a table of logits per prefix over a vocabulary of three;
all responses of one or three tokens are summed in float64, so there is no sampling noise. Shapes: N
responses, T tokens, V vocabulary.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from ms_align.losses.policy import PolicyLoss, per_response
from ms_align.rollouts.correction import correct
from ms_align.rollouts.options import RolloutOptions

VOCABULARY = 3
UNBIASED = 1e-10
"""Relative errors below this are rounding of float64."""
NO_CLIP = {"clip_low": 1e9, "clip_high": 1e9}
NO_LIMIT = {"importance_sampling_clip_max": None}
OFF = {"importance_sampling_correction": False}

CORRECTIONS: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": (OFF, {}),
    "`token_mask`, no limit": ({"importance_sampling_mode": "token_mask", **NO_LIMIT}, {}),
    "`token_truncate`, 2": (
        {"importance_sampling_mode": "token_truncate", "importance_sampling_clip_max": 2.0},
        {},
    ),
    "`token_mask`, 2": (
        {"importance_sampling_mode": "token_mask", "importance_sampling_clip_max": 2.0},
        {},
    ),
    "`sequence_mask`, no limit": (NO_LIMIT, {}),
    "`sequence_mask`, no limit, ratio of responses (`rloo`), no clip": (
        NO_LIMIT,
        {**NO_CLIP, "ratio": per_response},
    ),
    "`sequence_truncate`, 3": ({"importance_sampling_mode": "sequence_truncate"}, {}),
    "`sequence_mask`, 3 (default)": ({}, {}),
    "`rollout_rs`: `seq_mean_k1`, 1.5": (
        {**OFF, "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1.5},
        {},
    ),
    "`rollout_rs`: `seq_mean_k3`, 0.2": (
        {**OFF, "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.2},
        {},
    ),
    "default and `seq_mean_k3`, 0.2": (
        {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.2},
        {},
    ),
    "`off_policy_mask_threshold`, 0.1": ({**OFF, "off_policy_mask_threshold": 0.1}, {}),
    "`bypass_mode`": ({"bypass_mode": True}, {}),
    "`bypass_mode`, no clip": ({"bypass_mode": True}, NO_CLIP),
    "`bypass_mode`, ratio of responses (`rloo`), no clip": (
        {"bypass_mode": True},
        {**NO_CLIP, "ratio": per_response},
    ),
}
"""Settings of the rollout and of the policy loss, by name."""


def table(seed: int, length: int) -> Tensor:
    """Return logits for every prefix of a response, (prefixes, V)."""
    prefixes = sum(VOCABULARY**position for position in range(length))
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(prefixes, VOCABULARY, generator=chance).double()


def int8_copy(logits: Tensor) -> Tensor:
    """Round each row to 127 steps of its largest absolute value, as int8 weights do."""
    scale = logits.abs().amax(1, keepdim=True) / 127
    return (logits / scale).round() * scale


@frozen
class Responses:
    """All responses of a length, and the rows of the table that predict their tokens."""

    tokens: Tensor
    """(N, T)."""
    prefixes: Tensor
    """(N, T)."""

    @classmethod
    def of(cls, length: int) -> "Responses":
        """Enumerate the responses."""
        tokens = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=length)))
        prefixes, offset, number = torch.zeros_like(tokens), 0, torch.zeros(len(tokens)).long()
        for position in range(length):
            prefixes[:, position] = offset + number
            offset += VOCABULARY**position
            number = number * VOCABULARY + tokens[:, position]
        return cls(tokens, prefixes)

    def logprobs(self, logits: Tensor) -> Tensor:
        """Return the log-probability of each token, (N, T)."""
        return logits.log_softmax(-1)[self.prefixes, self.tokens]


@frozen
class Output:
    """Output of the table, as losses read it."""

    logprobs: Tensor

    def token_losses(self, targets: Tensor, *, temperature: float) -> Tensor:
        """Return -log π of each token, (N, T)."""
        return -self.logprobs

    def entropies(self, counted: Tensor, *, temperature: float) -> Tensor:
        """Return 0, as the entropy is only a statistic here."""
        return torch.zeros_like(self.logprobs)


def gradients(
    correction: str, length: int, policy: Tensor, proximal: Tensor, sampler: Tensor
) -> tuple[Tensor, Tensor]:
    """Return expected gradient of a correction and the exact one, (prefixes, V) each.

    Args:
        correction: key of `CORRECTIONS`.
        length: tokens of a response.
        policy: logits of the policy that is updated.
        proximal: logits of the policy at the start of the rollout's updates.
        sampler: logits of the model that sampled.
    """
    rollout_settings, loss_settings = CORRECTIONS[correction]
    responses = Responses.of(length)
    chance = torch.Generator().manual_seed(7)
    rewards = torch.randn(len(responses.tokens), generator=chance).double()
    sampling_logprobs, old_logprobs = responses.logprobs(sampler), responses.logprobs(proximal)
    probabilities = sampling_logprobs.sum(1).exp()  # of responses, (N,)
    # The baseline is the mean reward of the sampler, as of a large group.
    advantages = (rewards - (probabilities * rewards).sum())[:, None].expand_as(old_logprobs)
    mask = torch.ones_like(responses.tokens, dtype=torch.bool)
    options = RolloutOptions(**rollout_settings)
    corrected = correct(old_logprobs, sampling_logprobs, mask, advantages, options)
    batch = {
        "targets": responses.tokens,
        "advantages": advantages * corrected.weights,
        "old_logprobs": corrected.old_logprobs,
    }
    policy = policy.clone().requires_grad_()
    logprobs = responses.logprobs(policy)
    loss = PolicyLoss(aggregation="token", **loss_settings)
    losses, _ = loss.terms(Output(logprobs), batch, mask)  # (N, T)
    if loss.ratio is per_response:  # the same value at each token of a response
        losses = losses / length
    (expected,) = torch.autograd.grad((probabilities * losses.sum(1)).sum(), policy)
    value = (responses.logprobs(policy).sum(1).exp() * rewards).sum()
    (exact,) = torch.autograd.grad(-value, policy)
    return expected, exact


def biases(correction: str) -> list[float]:
    """Return the relative bias in the four situations of the table."""
    results = []
    for length, situation in ((1, "stale"), (3, "stale"), (3, "later"), (3, "int8")):
        policy = table(0, length)
        proximal = policy + (0.2 * table(1, length) if situation == "later" else 0.0)
        sampler = int8_copy(policy) if situation == "int8" else proximal + 0.6 * table(2, length)
        expected, exact = gradients(correction, length, policy, proximal, sampler)
        results.append(float((expected - exact).norm() / exact.norm()))
    return results


def rows() -> list[str]:
    """Return the rows of the table in Markdown."""
    return [
        f"| {name} | "
        + " | ".join("0" if bias < UNBIASED else f"{bias:.2g}" for bias in biases(name))
        + " |"
        for name in CORRECTIONS
    ]


if __name__ == "__main__":
    print("| Correction | 1 token, stale | 3 tokens, stale | later update | int8 sampler |")
    print("|---|---|---|---|---|")
    print("\n".join(rows()))
