"""Router statistics of a training step, and the load-balancing losses.

The balance loss of a layer is E · Σ_i f_i · P_i over its E experts: f_i is the fraction of tokens
routed to expert i, so f sums to k, and P_i is the mean score of expert i. This is the Switch loss
(Fedus et al., 2022) as in transformers, with one difference: it is the mean of the layers' losses,
while transformers averages f and P over layers first. Both equal k for an even load.

f is computed from counts and has no gradient. Given f, a token's gradient of its router logits
depends on that token alone, not on sums over tokens, microbatches or ranks. f is computed over the
token's document (the sequence-wise loss of DeepSeek-V3, arXiv:2412.19437) or over the previous
update.
"""

from typing import Any

import torch
from torch import Tensor

from ms_parallel.models.experts.replay import is_recomputing


class DocumentNumbers:
    """Document numbers that are unique over all rows; computed once per forward, for all layers."""

    def __init__(self) -> None:
        self._key: tuple[Tensor | None, tuple[int, int]] | None = None
        self._numbers = torch.empty(0, dtype=torch.int64)

    def numbers(self, documents: Tensor | None, like: Tensor) -> Tensor:
        """Number the documents of all rows, (B, S) int64; without documents, one per row.

        Args:
            documents: (B, S) int32 or None.
            like: (B, S, ...), for its size and device.
        """
        rows, positions = like.shape[:2]
        key = documents, (rows, positions)
        if self._key is None or self._key[0] is not documents or self._key[1] != key[1]:
            numbers = torch.arange(rows, device=like.device)[:, None].expand(rows, positions)
            if documents is not None:
                lowest = documents.min()
                numbers = numbers * (documents.max() - lowest + 1) + (documents - lowest)
                numbers = _renumbered(numbers)
            self._key, self._numbers = key, numbers
        return self._numbers


def _renumbered(numbers: Tensor) -> Tensor:
    """Replace numbers (B, S) by their rank among the distinct numbers, from 0.

    `torch.unique` returns the same, but synchronizes to get the number of distinct values.
    """
    values, order = numbers.flatten().sort()
    ranks = torch.zeros_like(values)
    ranks[1:] = (values[1:] != values[:-1]).cumsum(0)
    return torch.empty_like(ranks).scatter_(0, order, ranks).view(numbers.shape)


class RouterStats:
    """Statistics and balance losses of one router in one training step.

    Args:
        experts: number of experts E.
        documents: document numbers, shared by all layers of the process.
        rate: factor on f that gives the gradient of a token's score: coefficient · E / (layers ·
            tokens of the step). 0: no balance loss.
        z_rate: factor on the squared logsumexp of a token's logits. 0: no z-loss.
        load: f of the previous step, (E,); None to compute f per document.
        scale: gradient scale of the step.
        device: device of the router.
    """

    def __init__(
        self,
        experts: int,
        documents: DocumentNumbers,
        *,
        rate: float = 0.0,
        z_rate: float = 0.0,
        load: Tensor | None = None,
        scale: float = 1.0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.documents = documents
        self.rate, self.z_rate, self.load, self.scale = rate, z_rate, load, scale
        self.counts = torch.zeros(experts, dtype=torch.int64, device=device)
        """(E,): number of this process's tokens routed to each expert."""
        self.sums = torch.zeros(3, device=device)
        """Sums over this process's tokens: score entropy in nats, balance loss, z-loss."""

    def record(self, experts: Tensor, scores: Tensor) -> None:
        """Add the choices (B, S, k) and normalized scores (B, S, E) of this process's tokens."""
        # Integer counts, so their sum is exact in any order.
        flat = experts.flatten()
        self.counts.scatter_add_(0, flat, torch.ones_like(flat))
        # Entropy -Σ p log p; xlogy gives 0 for p = 0.
        self.sums[0] -= torch.xlogy(scores, scores).sum()

    def add_losses(
        self, weights: Tensor, logits: Tensor, scores: Tensor, experts: Tensor, load: Tensor
    ) -> Tensor:
        """Accumulate the losses; return `weights`, whose backward also adds their gradients.

        Args:
            weights: (B, S, k).
            logits: (B, S, E).
            scores: (B, S, E), normalized over experts.
            experts: (B, S, k).
            load: f, (E,) or (B, S, E).
        """
        if self.rate:
            # The loss is linear in the scores, so its gradient is a constant, rate · f.
            gradient = (self.rate * load).to(scores.dtype).expand_as(scores)
            if not is_recomputing():
                self.sums[1] += (gradient * scores.detach()).sum()
            weights = self._with_gradient(weights, scores, gradient)
        if self.z_rate:
            squares = logits.logsumexp(-1).square()
            if not is_recomputing():
                self.sums[2] += self.z_rate * squares.detach().sum()
            gradient = squares.new_full((), self.z_rate).expand_as(squares)
            weights = self._with_gradient(weights, squares, gradient)
        return weights

    def _with_gradient(self, weights: Tensor, scores: Tensor, gradient: Tensor) -> Tensor:
        scaled = gradient if self.scale == 1.0 else gradient * self.scale
        result: Tensor = _AddGradient.apply(weights, scores, scaled)  # type: ignore[no-untyped-call]
        return result

    def load_of_documents(self, experts: Tensor, numbers: Tensor, local_numbers: Tensor) -> Tensor:
        """Compute f over the document of each local token.

        Args:
            experts: (B, S, k), all positions.
            numbers: (B, S) document numbers, all positions.
            local_numbers: (B, local S) document numbers of this process's positions.

        Returns:
            (B, local S, E) float64 on a CPU, else float32.
        """
        # On an accelerator, use a bound: reading the number of documents would synchronize.
        count = int(numbers.max()) + 1 if numbers.device.type == "cpu" else numbers.numel()
        pairs = numbers[..., None] * len(self.counts) + experts  # (B, S, k), document · E + expert
        size = count * len(self.counts)
        ones = torch.ones_like(pairs).flatten()
        # (documents · E,) tokens of a document routed to an expert.
        routed = ones.new_zeros(size).scatter_add_(0, pairs.flatten(), ones)
        # (documents,) tokens of a document.
        tokens = ones.new_zeros(count).scatter_add_(0, numbers.flatten(), ones[: numbers.numel()])
        wide = torch.float64 if pairs.device.type == "cpu" else torch.float32
        load = routed.view(count, -1).to(wide) / tokens[:, None]  # (documents, E)
        return load[local_numbers]


class RouterWithStats:
    """Mixin for routers that can record statistics and add balance losses."""

    stats: RouterStats | None = None
    """Statistics of the current step; None outside a training step."""
    sees_all_positions: bool = False
    """Whether every tensor rank routes all positions rather than its own slice."""


class _AddGradient(torch.autograd.Function):
    """Identity on `weights` whose backward adds a precomputed gradient to `scores`."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, scores: Tensor, gradient: Tensor) -> Tensor:
        """Return weights unchanged."""
        ctx.save_for_backward(gradient)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, grad_weights: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of weights and scores."""
        (gradient,) = ctx.saved_tensors
        return grad_weights, gradient, None
