"""Top-k expert router.

Shapes: B rows, S positions, H hidden, E experts, k experts per token. Logits and scores are float32
(float64 for float64) in every compute dtype: rounded to bfloat16 they tie and choices flip.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ms_parallel.models.experts.account import Account, Accounted
from ms_parallel.models.experts.choice import Choice
from ms_parallel.models.experts.kept import decide
from ms_parallel.models.staged import Context
from ms_parallel.operators.cpu import widen


class Router(nn.Module, Accounted):
    """Linear router with top-k selection.

    Args:
        hidden: Hidden size H.
        choice: Router settings.
    """

    e_score_correction_bias: Tensor
    """(E,) float32 selection bias without gradient, if `choice.corrected`."""

    def __init__(self, hidden: int, choice: Choice) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(choice.num_experts, hidden))
        self.bias = nn.Parameter(torch.empty(choice.num_experts)) if choice.bias else None
        if choice.corrected:
            zeros = torch.zeros(choice.num_experts, dtype=torch.float32)
            self.register_buffer("e_score_correction_bias", zeros)
        self.choice = choice
        self.whole: Callable[[Tensor], Tensor] = lambda x: x
        """Gathers all positions (B, S, ...) from this process's (B, part of S, ...)."""
        self.part = 0
        """Index of this process's part of the positions."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        """Convert the parameters; keep the selection bias in float32, where its steps are exact."""
        exact = getattr(self, "e_score_correction_bias", None)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if exact is not None and self.e_score_correction_bias.dtype != exact.dtype:
            self.e_score_correction_bias = exact.to(self.e_score_correction_bias.device)
        return self

    def forward(self, hidden: Tensor, *, context: Context | None = None) -> tuple[Tensor, Tensor]:
        """Select experts and weights for each token.

        Args:
            hidden: (B, S, H), or this process's part of S.
            context: Context of the forward pass, for its documents.

        Returns:
            experts (B, S, k) int64 and weights (B, S, k).
        """
        bias = None if self.bias is None else widen(self.bias)
        logits = F.linear(widen(hidden), widen(self.weight), bias)
        scores = logits.sigmoid() if self.choice.scores == "sigmoid" else logits.softmax(-1)
        account, shares = self.account if torch.is_grad_enabled() else None, scores
        if account is not None and self.choice.scores == "sigmoid":
            shares = scores / (scores.sum(-1, keepdim=True) + 1e-20)
        experts = decide(lambda: self._choose(scores.detach(), shares.detach(), account))
        weights = self._weights(logits, scores, experts)
        if account is not None and (account.rate or account.z_rate):
            load = self._load(account, experts, context)
            weights = account.charge(weights, logits, shares, experts, load)
        return experts, weights

    @torch.no_grad()
    def _choose(self, scores: Tensor, shares: Tensor, account: Account | None) -> Tensor:
        choice = self.choice
        if choice.corrected:
            scores = scores + self.e_score_correction_bias
        if choice.chosen_groups < choice.groups:
            grouped = scores.view(*scores.shape[:-1], choice.groups, -1)
            best = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
            top_groups = best.topk(choice.chosen_groups, -1).indices
            mask = torch.ones_like(best, dtype=torch.bool).scatter_(-1, top_groups, False)
            scores = grouped.masked_fill(mask[..., None], -torch.inf).flatten(-2)
        experts = scores.topk(choice.num_experts_per_tok, -1).indices
        if account is not None:
            account.note(experts, shares)
        return experts

    def _weights(self, logits: Tensor, scores: Tensor, experts: Tensor) -> Tensor:
        choice = self.choice
        if choice.scores == "softmax_of_chosen":
            weights = logits.gather(-1, experts).softmax(-1)
        else:
            weights = scores.gather(-1, experts)
            if choice.normalized:
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights if choice.factor == 1.0 else weights * choice.factor

    def _load(self, account: Account, experts: Tensor, context: Context | None) -> Tensor:
        if account.load is not None or not account.rate:
            return account.load if account.load is not None else experts.new_zeros(())
        all_experts = self.whole(experts)
        documents = None if context is None else context.documents
        split = None if context is None else context.row_split
        all_experts = all_experts if split is None else split.whole(all_experts)
        numbers = account.documents.numbers(documents, all_experts)
        local_numbers = numbers if split is None else split.mine(numbers)
        first = self.part * experts.shape[1]
        local_numbers = local_numbers[:, first : first + experts.shape[1]]
        return account.load_of_documents(all_experts, numbers, local_numbers)
