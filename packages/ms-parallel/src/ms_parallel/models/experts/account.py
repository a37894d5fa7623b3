"""Router statistics of an update, and the load-balancing losses.

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

from ms_parallel.models.experts.kept import recomputes


class Documents:
    """Document numbers over all rows, computed once for all layers of a forward pass."""

    def __init__(self) -> None:
        self._of: tuple[Tensor | None, tuple[int, int]] | None = None
        self._numbers = torch.empty(0, dtype=torch.int64)

    def numbers(self, documents: Tensor | None, like: Tensor) -> Tensor:
        """Number the documents of all rows, (B, S) int64; without documents, one per row.

        Args:
            documents: (B, S) int32 or None.
            like: (B, S, ...), for its size and device.
        """
        rows, positions = like.shape[:2]
        key = documents, (rows, positions)
        if self._of is None or self._of[0] is not documents or self._of[1] != key[1]:
            row = torch.arange(rows, device=like.device)[:, None].expand(rows, positions)
            if documents is not None:
                least = documents.min()
                row = row * (documents.max() - least + 1) + (documents - least)
                row = torch.unique(row, return_inverse=True)[1]
            self._of, self._numbers = key, row
        return self._numbers


class Account:
    """Statistics and balance losses of one router in one update.

    Args:
        experts: number of experts E.
        documents: shared by the layers of a process.
        rate: factor on f that gives the gradient of a token's score: coefficient · E / (layers ·
            tokens of the update). 0 for no balance loss.
        z_rate: factor on the squared logsumexp of a token's logits.
        load: (E,), f of the previous update; None to compute f per document.
        scale: gradient scale of the update.
        device: device of the router.
    """

    def __init__(
        self,
        experts: int,
        documents: Documents,
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

    def note(self, experts: Tensor, scores: Tensor) -> None:
        """Add the choices (B, S, k) and normalized scores (B, S, E) of this process's tokens."""
        flat = experts.flatten()
        self.counts.scatter_add_(0, flat, torch.ones_like(flat))
        self.sums[0] -= torch.xlogy(scores, scores).sum()

    def charge(
        self, weights: Tensor, logits: Tensor, scores: Tensor, experts: Tensor, load: Tensor
    ) -> Tensor:
        """Accumulate the losses and return `weights`, whose backward also emits their gradients.

        Args:
            weights: (B, S, k).
            logits: (B, S, E).
            scores: (B, S, E), normalized over experts.
            experts: (B, S, k).
            load: f, (E,) or (B, S, E).
        """
        if self.rate:
            gradient = (self.rate * load).to(scores.dtype).expand_as(scores)
            if not recomputes():
                self.sums[1] += (gradient * scores.detach()).sum()
            weights = self._brought(weights, scores, gradient)
        if self.z_rate:
            squares = logits.logsumexp(-1).square()
            if not recomputes():
                self.sums[2] += self.z_rate * squares.detach().sum()
            gradient = squares.new_full((), self.z_rate).expand_as(squares)
            weights = self._brought(weights, squares, gradient)
        return weights

    def _brought(self, weights: Tensor, scores: Tensor, gradient: Tensor) -> Tensor:
        scaled = gradient if self.scale == 1.0 else gradient * self.scale
        brought: Tensor = _Bring.apply(weights, scores, scaled)  # type: ignore[no-untyped-call]
        return brought

    def load_of_documents(self, experts: Tensor, numbers: Tensor, own: Tensor) -> Tensor:
        """Compute f of each token's document.

        Args:
            experts: (B, S, k) for all positions of the rows.
            numbers: (B, S) document numbers.
            own: (B, positions of this process) document numbers.

        Returns:
            (B, positions of this process, E) float64 on a CPU, else float32.
        """
        count = int(numbers.max()) + 1
        pairs = numbers[..., None] * len(self.counts) + experts
        size = count * len(self.counts)
        ones = torch.ones_like(pairs).flatten()
        chosen = ones.new_zeros(size).scatter_add_(0, pairs.flatten(), ones)
        tokens = ones.new_zeros(count).scatter_add_(0, numbers.flatten(), ones[: numbers.numel()])
        wide = torch.float64 if pairs.device.type == "cpu" else torch.float32
        load = chosen.view(count, -1).to(wide) / tokens[:, None]
        return load[own]


class Accounted:
    """Mixin for routers with statistics and balance losses."""

    account: Account | None = None
    """Account of the current update, if any."""
    everywhere: bool = False
    """Whether each tensor rank routes all positions instead of its part of them."""


class _Bring(torch.autograd.Function):
    """Identity on weights that adds a precomputed gradient to scores."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, scores: Tensor, gradient: Tensor) -> Tensor:
        """Return weights unchanged."""
        ctx.save_for_backward(gradient)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, of_weights: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of the weights and of the scores."""
        (gradient,) = ctx.saved_tensors
        return of_weights, gradient, None
