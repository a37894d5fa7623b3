"""A scored rollout, and the replacement of its groups with equal rewards.

Shapes: N responses, S positions, G groups of n responses to the same prompt, adjacent.
"""

from collections.abc import Mapping, Sequence

import torch
from attrs import evolve, frozen
from torch import Tensor

from ms_align.generation.responses import Responses
from ms_align.generation.routing import FREE
from ms_align.losses.protocol import IGNORED
from ms_align.rewards.scoring import BatchRewards, Sample

PADDING = {"targets": IGNORED, "routed_experts": FREE}
"""Padding values after the end of a row; 0 for other tensors."""


@frozen(kw_only=True)
class Rollout:
    """Responses of all data ranks, their training rows and scores."""

    rows: Mapping[str, Tensor]
    """Training rows by column, (N, S) each."""
    responses: Responses
    scores: BatchRewards
    samples: Sequence[Sample]
    shaped: Tensor
    """(N,) float32: scores after penalties; not finite for skipped responses."""

    def informative_groups(self, num_generations: int) -> Tensor:
        """Return True for groups with two different valid rewards, (G,) bool."""
        groups = self.shaped.view(-1, num_generations)
        skipped = ~groups.isfinite()
        # Extremes over valid rewards; without any, -inf > inf is False.
        highest = groups.masked_fill(skipped, -torch.inf).amax(1)
        return highest > groups.masked_fill(skipped, torch.inf).amin(1)

    def refill(self, other: "Rollout", num_generations: int) -> "tuple[Rollout, Tensor]":
        """Replace groups with equal rewards by informative groups of another rollout.

        Returns:
            The new rollout, and the indices of the replaced responses, (r,) int64.
        """
        empty = (~self.informative_groups(num_generations)).nonzero()[:, 0]
        usable = other.informative_groups(num_generations).nonzero()[:, 0]
        count = min(len(empty), len(usable))
        members = torch.arange(num_generations)
        replaced = (empty[:count, None] * num_generations + members).flatten()
        size = len(self.shaped)
        index = torch.arange(size)  # into this rollout's rows, followed by the other's
        index[replaced] = size + (usable[:count, None] * num_generations + members).flatten()

        def select(first: Tensor, second: Tensor, padding: int = 0) -> Tensor:
            if first.ndim > 1:  # the rollouts may differ in their longest rows
                width, later = max(first.shape[1], second.shape[1]), 2 * (first.ndim - 2)
                first, second = (
                    torch.nn.functional.pad(x, (*[0] * later, 0, width - x.shape[1]), value=padding)
                    for x in (first, second)
                )
            return torch.cat((first, second))[index]

        rollout = Rollout(
            rows={
                name: select(column, other.rows[name], PADDING.get(name, 0))
                for name, column in self.rows.items()
            },
            responses=evolve(
                self.responses,
                tokens=select(self.responses.tokens, other.responses.tokens),
                lengths=select(self.responses.lengths, other.responses.lengths),
                stopped=select(self.responses.stopped, other.responses.stopped),
                tool_mask=None
                if self.responses.tool_mask is None or other.responses.tool_mask is None
                else select(self.responses.tool_mask, other.responses.tool_mask),
                episodes=None
                if self.responses.episodes is None or other.responses.episodes is None
                else [
                    [*self.responses.episodes, *other.responses.episodes][position]
                    for position in index.tolist()
                ],
            ),
            scores=BatchRewards(
                total=select(self.scores.total, other.scores.total),
                parts={
                    name: select(part, other.scores.parts[name])
                    for name, part in self.scores.parts.items()
                },
                failures=(*self.scores.failures, *other.scores.failures),
            ),
            samples=[[*self.samples, *other.samples][position] for position in index.tolist()],
            shaped=select(self.shaped, other.shaped),
        )
        return rollout, replaced
