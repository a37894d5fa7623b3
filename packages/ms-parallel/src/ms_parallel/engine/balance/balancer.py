"""Expert load balancing: token counts per expert and step, balance losses, and bias updates.

Counts are integers summed over all processes once per step, so they, the bias and the factors of
the losses are the same under every layout and microbatch size.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from ms_parallel.cluster.groups import Groups
from ms_parallel.engine.balance.settings import BalanceSettings
from ms_parallel.host_copy import send
from ms_parallel.models.experts.router_config import Mixture
from ms_parallel.models.experts.router_stats import DocumentNumbers, RouterStats, RouterWithStats

COUNTS = "experts.counts"
LAYER = re.compile(r".*\blayers\.(\d+)\.")
NUM_SUMS = 3
"""Number of sums in `RouterStats`."""


@frozen(kw_only=True, eq=False)
class ExpertLoad:
    """Distribution of a step's tokens over experts; the same on every process."""

    layers: tuple[int, ...]
    """Indices of the MoE layers."""
    counts: Tensor
    """(layers, experts) int64: tokens routed to each expert; none are dropped."""
    entropy: tuple[float, ...]
    """Entropy of each layer's router scores in nats, averaged over tokens; log E if uniform."""
    balance_loss: float
    """Balance loss, including its coefficient."""
    z_loss: float
    """Router z-loss, including its coefficient."""
    bias: Tensor | None
    """(layers, experts) float32 selection bias before the update; None for routers without it."""
    ranks: int = 1
    """Number of ranks over which the experts are split evenly."""

    @property
    def dropped_share(self) -> float:
        """Fraction of routing choices that were dropped; always 0."""
        return 0.0

    @property
    def highest_load(self) -> float:
        """Load of the busiest expert relative to a uniform load; 0 without tokens."""
        return _highest(self.counts)

    @property
    def highest_rank_load(self) -> float:
        """Load of the busiest expert-parallel rank relative to a uniform load; 0 without tokens."""
        return _highest(self.counts.view(len(self.counts), self.ranks, -1).sum(2))

    @property
    def by_layer(self) -> dict[str, str]:
        """Counts and bias of each layer, as JSON in flat fields."""
        sums = {"counts": self.counts} | ({} if self.bias is None else {"bias": self.bias})
        return {
            f"{name}.{layer}": json.dumps(values)
            for name, rows in sums.items()
            for layer, values in zip(self.layers, rows.tolist(), strict=True)
        }


def _highest(counts: Tensor) -> float:
    """Maximum of `counts` (rows, parts) relative to the mean of its row."""
    even = counts.sum(1, keepdim=True) / counts.shape[1]
    return float((counts / even).nan_to_num(0.0).max())


class ExpertBalancer:
    """Routers of this process's stages, and the full model's counts of the previous step.

    Args:
        stages: this process's stages by number.
        mixture: expert settings of the full model; None for a dense model.
        groups: process groups of the layout.
        balance: balancing settings.

    Raises:
        ConfigError: the settings need something that the model does not have.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        mixture: Mixture | None,
        groups: Groups,
        balance: BalanceSettings,
    ) -> None:
        self.balance = balance.of(mixture)
        self.mixture, self.groups = mixture, groups
        self.layers = mixture.layers if mixture is not None else ()
        self.names: dict[str, Any] = {}
        self.rows: dict[int, Any] = {}
        for stage in stages.values() if self.layers else ():
            for name, module in stage.named_modules():
                match = LAYER.match(name)
                if isinstance(module, RouterWithStats) and match and int(match[1]) in self.layers:
                    self.names[name] = module
                    self.rows[self.layers.index(int(match[1]))] = module
        experts = mixture.choice.num_experts if mixture is not None else 0
        self.top_k = mixture.choice.num_experts_per_tok if mixture is not None else 0
        self.corrected = mixture is not None and mixture.choice.corrected
        self.counts = torch.zeros(len(self.layers), experts, dtype=torch.int64)
        """(layers, experts): counts of the last performed update; zeros before the first."""

    @property
    def state(self) -> dict[str, Tensor]:
        """State that the next step depends on, by name; shares storage."""
        if not self.layers:
            return {}
        biases = {
            f"{name}.e_score_correction_bias": router.e_score_correction_bias
            for name, router in self.names.items()
            if self.corrected
        }
        return {COUNTS: self.counts, **biases}

    def for_stages(self, stages: Mapping[int, nn.Module]) -> "ExpertBalancer":
        """Build a balancer with the same counts for a second copy of the stages."""
        balancer = ExpertBalancer(stages, self.mixture, self.groups, self.balance)
        balancer.counts = self.counts
        return balancer

    @contextmanager
    def count_tokens(self, tokens: int, scale: float = 1.0) -> Iterator[None]:
        """Count routed tokens and add the gradients of the balance losses inside the block.

        Args:
            tokens: number of tokens in the global batch.
            scale: factor on all gradients of the step.
        """
        if not self.layers:  # a dense model
            yield
            return
        documents, num_terms = DocumentNumbers(), len(self.layers) * tokens
        # d(coefficient · E · mean over layers of Σ f · P) / d(score of one token) = rate · f.
        rate = (self.balance.coefficient or 0.0) * self.counts.shape[1] / num_terms
        z_rate = self.balance.z_loss_coefficient / num_terms
        # The step-wise loss needs the counts of an earlier update.
        has_counts = bool(self.counts.any())
        loads = self._previous_loads() if self.balance.method == "step" else {}
        for row, router in self.rows.items():
            router.stats = RouterStats(
                self.counts.shape[1],
                documents,
                rate=rate if has_counts or not loads else 0.0,
                z_rate=z_rate,
                load=loads.get(row),
                scale=scale,
                device=self.groups.device,
            )
        try:
            yield
        except BaseException:
            # Without an error, the statistics stay until `reduce` sums them.
            self._drop_stats()
            raise

    def _previous_loads(self) -> dict[int, Tensor]:
        """Return f (E,) of the previous step for each local MoE layer; f sums to k over experts."""
        totals = self.counts.sum(1, keepdim=True).clamp_min(1)
        loads = self.counts.double() * self.top_k / totals  # (layers, E) float64
        dtypes = {row: router.weight.dtype for row, router in self.rows.items()}
        # One message for all layers, in the precision of the routers.
        on_device = {
            dtype: send(loads.to(torch.promote_types(dtype, torch.float32)), self.groups.device)
            for dtype in set(dtypes.values())
        }
        return {row: on_device[dtype][row] for row, dtype in dtypes.items()}

    def reduce(self) -> tuple[Tensor, ...]:
        """Sum the step's statistics over all processes, for `load_of`. Collective.

        Returns:
            (layers, experts) int64 counts, and (layers, `NUM_SUMS` + experts) sums and selection
            biases, on the device; nothing for a dense model.
        """
        if not self.layers:
            return ()
        device = self.groups.device
        counts = torch.zeros(self.counts.shape, dtype=torch.int64, device=device)
        # Columns: the sums of `RouterStats`, then the selection bias of each expert.
        sums = torch.zeros(len(self.layers), NUM_SUMS + self.counts.shape[1], device=device)
        for row, router in self.rows.items():
            assert router.stats is not None
            # Routers that see all positions have equal counts on all tensor ranks: count them once.
            if router.sees_all_positions and self.groups.place.tensor > 0:
                continue
            counts[row] = router.stats.counts
            sums[row, :NUM_SUMS] = router.stats.sums
            # The bias is replicated, so one rank contributes it to the sum.
            if self.corrected and self.groups.place.tensor == 0 and self.groups.token_rank == 0:
                sums[row, NUM_SUMS:] = router.e_score_correction_bias
        self._drop_stats()
        return self.groups.all_reduce(counts), self.groups.all_reduce(sums)

    def load_of(self, sums_on_host: Sequence[Tensor], tokens: int) -> ExpertLoad | None:
        """Return the routing of a step's tokens, from the result of `reduce` on the CPU."""
        if not sums_on_host:
            return None
        counts, sums = sums_on_host
        return ExpertLoad(
            layers=self.layers,
            counts=counts,
            entropy=tuple((sums[:, 0] / tokens).tolist()),
            balance_loss=float(sums[:, 1].sum()),
            z_loss=float(sums[:, 2].sum()),
            bias=sums[:, NUM_SUMS:] if self.corrected else None,
            ranks=self.groups.layout.expert,
        )

    @torch.no_grad()
    def update_bias(self, load: ExpertLoad | None) -> None:
        """Store the counts of a step and update the selection bias; None for a skipped step.

        An expert's bias rises by the rate if its count is below the mean, and falls if above
        (DeepSeek-V3, section 2.1.2). In integers: sign(total - E · count).
        """
        if load is None:
            return
        self.counts.copy_(load.counts)
        if self.balance.method != "bias":
            return
        total, experts = load.counts.sum(1, keepdim=True), load.counts.shape[1]
        steps = (total - experts * load.counts).sign().float() * self.balance.bias_rate
        steps = send(steps, self.groups.device)
        for row, router in self.rows.items():
            router.e_score_correction_bias += steps[row]

    def _drop_stats(self) -> None:
        for router in self.rows.values():
            router.stats = None
