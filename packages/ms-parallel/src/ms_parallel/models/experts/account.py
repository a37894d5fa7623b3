"""What routers note during an update, and the balance losses that they add to it.

The balance loss of a layer is E · Σ_i f_i · P_i over its E experts: f_i is the number of tokens
that chose expert i over the number of tokens, so that f sums to the choices of a token, and P_i is
the mean of the scores. This is the loss of Switch (Fedus et al., 2022) as transformers computes it,
but for one difference: it is the mean of the layers' losses, while transformers multiplies f and P
that were averaged over layers first. Both are the choices of a token where load is even.

f is made of whole numbers and has no gradient. Given f, what a token adds to the gradient of its
router's logits depends on that token alone: no sum over tokens, microbatches or ranks enters it. It
is that of the token's own document (the sequence-wise loss of DeepSeek-V3, arXiv:2412.19437), or
that of the whole previous update.
"""

from typing import Any

import torch
from torch import Tensor

from ms_parallel.models.experts.kept import recomputes


class Documents:
    """Numbers of documents over all rows, computed once for all layers of a forward."""

    def __init__(self) -> None:
        self._of: tuple[Tensor | None, tuple[int, int]] | None = None
        self._numbers = torch.empty(0, dtype=torch.int64)

    def numbers(self, documents: Tensor | None, like: Tensor) -> Tensor:
        """Number documents through all rows, (B, S) int64; without documents a row is one.

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
    """One router's account of one update.

    Args:
        experts: of the layer.
        documents: shared by the layers of a process.
        rate: what f is multiplied by to be the gradient of a token's score: the loss's coefficient
            times the experts, over the layers and the tokens of the whole update. 0 for no loss.
        z_rate: what the square of the logsumexp of a token's logits is multiplied by.
        load: (E,), f of the previous update; None for that of each token's document.
        scale: what all gradients of the update are multiplied by.
        device: of the router.
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
        """(E,): how many of this process's tokens chose each expert."""
        self.sums = torch.zeros(3, device=device)
        """Over this process's tokens: entropy of the scores in nats, balance loss, z-loss."""

    def note(self, experts: Tensor, scores: Tensor) -> None:
        """Count what tokens (B, S, k) of this process chose by scores (B, S, E) that sum to 1."""
        flat = experts.flatten()
        self.counts.scatter_add_(0, flat, torch.ones_like(flat))
        self.sums[0] -= torch.xlogy(scores, scores).sum()

    def charge(
        self, weights: Tensor, logits: Tensor, scores: Tensor, experts: Tensor, load: Tensor
    ) -> Tensor:
        """Add up the losses; return the same weights, whose backward brings their gradients along.

        Args:
            weights: (B, S, k).
            logits: (B, S, E).
            scores: (B, S, E), whose sum over experts is 1.
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
            experts: (B, S, k) of all positions of the rows.
            numbers: (B, S) of their documents.
            own: (B, positions of this process), the numbers of theirs.

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
    """A router whose choices an update counts, and balances; a part of a module."""

    account: Account | None = None
    """The account of the update that is under way, if there is one."""
    everywhere: bool = False
    """Whether each tensor rank chooses for all positions, and not for its part of them."""


class _Bring(torch.autograd.Function):
    """The same weights; scores get a gradient that was known before the backward."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, scores: Tensor, gradient: Tensor) -> Tensor:
        """Pass weights through as they are."""
        ctx.save_for_backward(gradient)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, of_weights: Tensor) -> tuple[Tensor, Tensor, None]:
        """Give the gradients of the weights and of the scores."""
        (gradient,) = ctx.saved_tensors
        return of_weights, gradient, None
