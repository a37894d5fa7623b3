"""Top-k expert router.

Shapes: B rows, S positions, H hidden, E experts, k experts per token. Logits and scores are float32
(float64 for float64) in every compute dtype: rounded to bfloat16 they tie and choices flip.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ms_parallel.models.experts.replay import replayed
from ms_parallel.models.experts.router_config import RouterConfig
from ms_parallel.models.experts.router_stats import RouterStats, RouterWithStats
from ms_parallel.models.staged import Context
from ms_parallel.operators.cpu import widen


class Replay:
    """Experts that a router uses instead of its selection.

    Args:
        experts: (B, S, k) int64, all positions; where the first of k is negative, the router
            selects.
    """

    def __init__(self, experts: Tensor) -> None:
        self.experts = experts
        zero = torch.zeros((), dtype=torch.int64, device=experts.device)
        self.count, self.differing = zero, zero
        """Number of replayed tokens, and of those for which the router selects other experts."""

    def replace(self, selected: Tensor, part: int) -> Tensor:
        """Replace the selected experts (B, S, k) of slice `part` of the positions."""
        first = part * selected.shape[1]
        recorded = self.experts[:, first : first + selected.shape[1]]
        replayed = recorded[..., :1] >= 0  # (B, S, 1)
        # Compared as sets: the order of a token's experts does not matter.
        differs = (selected.sort(-1).values != recorded.sort(-1).values).any(-1, keepdim=True)
        self.count = self.count + replayed.sum()
        self.differing = self.differing + (replayed & differs).sum()
        return torch.where(replayed, recorded, selected)


class Router(nn.Module, RouterWithStats):
    """Linear router with top-k selection.

    Args:
        hidden: Hidden size H.
        choice: Router settings.
    """

    e_score_correction_bias: Tensor
    """(E,) float32 selection bias without gradient, if `choice.corrected`."""

    def __init__(self, hidden: int, choice: RouterConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(choice.num_experts, hidden))
        self.bias = nn.Parameter(torch.empty(choice.num_experts)) if choice.bias else None
        if choice.corrected:
            zeros = torch.zeros(choice.num_experts, dtype=torch.float32)
            self.register_buffer("e_score_correction_bias", zeros)
        self.choice = choice
        self.gather_sequence: Callable[[Tensor], Tensor] = lambda x: x
        """Gathers all positions (B, S, ...) from each rank's slice (B, local S, ...)."""
        self.part = 0
        """Index of this rank's slice of the positions."""
        self.replay: Replay | None = None
        """Recorded experts of the current forward pass. None: the router selects."""
        self.on_selection: Callable[[Tensor], None] | None = None
        """Called with the experts (B, S, k) of each forward pass."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        """Convert the parameters; keep the selection bias in float32, where its steps are exact."""
        # A cast to bfloat16 would lose it, so it is saved before.
        exact = getattr(self, "e_score_correction_bias", None)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if exact is not None and self.e_score_correction_bias.dtype != exact.dtype:
            self.e_score_correction_bias = exact.to(self.e_score_correction_bias.device)
        return self

    def forward(self, hidden: Tensor, *, context: Context | None = None) -> tuple[Tensor, Tensor]:
        """Select experts and weights for each token.

        Args:
            hidden: (B, S, H), or this rank's slice of S.
            context: Context of the forward pass, for its documents.

        Returns:
            experts (B, S, k) int64 and weights (B, S, k).
        """
        bias = None if self.bias is None else widen(self.bias)
        logits = F.linear(widen(hidden), widen(self.weight), bias)
        scores = logits.sigmoid() if self.choice.scores == "sigmoid" else logits.softmax(-1)
        stats, probs = self.stats if torch.is_grad_enabled() else None, scores  # (B, S, E)
        if stats is not None and self.choice.scores == "sigmoid":
            # The balance loss needs scores that sum to 1 over experts (DeepSeek-V3, eq. 19).
            probs = scores / (scores.sum(-1, keepdim=True) + 1e-20)
        # Detached: the choice has no gradient. Recomputation must repeat it, even if the bias
        # changed.
        experts = replayed(lambda: self._select(scores.detach(), probs.detach(), stats))
        weights = self._weights(logits, scores, experts)
        if stats is not None and (stats.rate or stats.z_rate):
            load = self._load(stats, experts, context)
            weights = stats.add_losses(weights, logits, probs, experts, load)
        return experts, weights

    @torch.no_grad()
    def _select(self, scores: Tensor, probs: Tensor, stats: RouterStats | None) -> Tensor:
        """Select the top-k experts (B, S, k), from the best groups if routing is group-limited."""
        choice = self.choice
        if choice.corrected:
            # The bias decides which experts are chosen, but not their weights.
            scores = scores + self.e_score_correction_bias
        if choice.topk_groups < choice.groups:
            grouped = scores.view(*scores.shape[:-1], choice.groups, -1)  # (B, S, groups, E/groups)
            # A group ranks by the sum of its two best scores (DeepSeek-V3, section 2.1.2).
            group_scores = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
            top_groups = group_scores.topk(choice.topk_groups, -1).indices
            mask = torch.ones_like(group_scores, dtype=torch.bool).scatter_(-1, top_groups, False)
            scores = grouped.masked_fill(mask[..., None], -torch.inf).flatten(-2)
        experts = scores.topk(choice.num_experts_per_tok, -1).indices
        if self.replay is not None:
            experts = self.replay.replace(experts, self.part)
        if self.on_selection is not None:
            self.on_selection(experts)
        if stats is not None:
            stats.record(experts, probs)
        return experts

    def _weights(self, logits: Tensor, scores: Tensor, experts: Tensor) -> Tensor:
        choice = self.choice
        if choice.scores == "softmax_of_topk":
            weights = logits.gather(-1, experts).softmax(-1)
        else:
            weights = scores.gather(-1, experts)
            if choice.normalized:
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights if choice.factor == 1.0 else weights * choice.factor

    def _load(self, stats: RouterStats, experts: Tensor, context: Context | None) -> Tensor:
        """Return f: of the previous step, or of each local token's document."""
        if stats.load is not None or not stats.rate:
            return stats.load if stats.load is not None else experts.new_zeros(())
        # Documents span ranks: gather over sequence parallelism, then over context parallelism.
        all_experts = self.gather_sequence(experts)
        documents = None if context is None else context.documents
        split = None if context is None else context.row_split
        all_experts = all_experts if split is None else split.gather(all_experts)
        numbers = stats.documents.numbers(documents, all_experts)
        local_numbers = numbers if split is None else split.select_local(numbers)
        # Under sequence parallelism, this rank's slice of the positions.
        first = self.part * experts.shape[1]
        local_numbers = local_numbers[:, first : first + experts.shape[1]]
        return stats.load_of_documents(all_experts, numbers, local_numbers)
