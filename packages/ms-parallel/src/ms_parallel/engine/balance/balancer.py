"""Counts over an update how many tokens chose each expert, and balances the next ones by it.

Counts are whole numbers, summed over all processes once an update, so that they, the bias and the
losses' factors are the same under every layout and however the batch is cut.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from ms_parallel.cluster.groups import Groups
from ms_parallel.engine.balance.settings import Balance
from ms_parallel.models.experts.account import Account, Accounted, Documents
from ms_parallel.models.experts.choice import Mixture

COUNTS = "experts.counts"
LAYER = re.compile(r".*\blayers\.(\d+)\.")
NOTED = 3
"""Sums of an account."""


@frozen(kw_only=True, eq=False)
class ExpertLoad:
    """How an update's tokens were shared out over experts; the same on every process."""

    layers: tuple[int, ...]
    """Numbers of the layers that have experts."""
    counts: Tensor
    """(layers, experts) int64: tokens that chose each; none is ever dropped."""
    entropy: tuple[float, ...]
    """Entropy of each layer's scores in nats, the mean over tokens; log E where they are even."""
    balance_loss: float
    """What balancing adds to the loss, its coefficient included."""
    z_loss: float
    """What the logits' size adds to the loss, its coefficient included."""
    bias: Tensor | None
    """(layers, experts) float32 before the update, where scores are corrected."""
    ranks: int = 1
    """Processes that share out the experts, as many for each."""

    @property
    def dropped_share(self) -> float:
        """Share of the choices that no expert took: none."""
        return 0.0

    @property
    def highest_load(self) -> float:
        """The most that any expert had, in times of an even share; 0 where no token came."""
        return _highest(self.counts)

    @property
    def highest_rank_load(self) -> float:
        """The same of the ranks of the expert axis, each of which has a share of the experts."""
        return _highest(self.counts.view(len(self.counts), self.ranks, -1).sum(2))

    @property
    def by_layer(self) -> dict[str, str]:
        """Each layer's counts, and its bias where it has one, as JSON in flat fields."""
        facts = {"counts": self.counts} | ({} if self.bias is None else {"bias": self.bias})
        return {
            f"{name}.{layer}": json.dumps(values)
            for name, rows in facts.items()
            for layer, values in zip(self.layers, rows.tolist(), strict=True)
        }


def _highest(counts: Tensor) -> float:
    """Return the most in any row of `counts` (rows, parts), in times of the row's even share."""
    even = counts.sum(1, keepdim=True) / counts.shape[1]
    return float((counts / even).nan_to_num(0.0).max())


class Balancer:
    """The routers of this process's stages, and what the whole model's did in the last update.

    Args:
        stages: this process's, by number.
        mixture: of the whole model; None where it has none, and then nothing is done.
        groups: the layout's processes.
        balance: how.

    Raises:
        ConfigError: the settings ask for what the model does not have.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        mixture: Mixture | None,
        groups: Groups,
        balance: Balance,
    ) -> None:
        self.balance = balance.of(mixture)
        self.mixture, self.groups = mixture, groups
        self.layers = mixture.layers if mixture is not None else ()
        self.names: dict[str, Any] = {}
        self.rows: dict[int, Any] = {}
        for stage in stages.values() if self.layers else ():
            for name, module in stage.named_modules():
                found = LAYER.match(name)
                if isinstance(module, Accounted) and found and int(found[1]) in self.layers:
                    self.names[name] = module
                    self.rows[self.layers.index(int(found[1]))] = module
        experts = mixture.choice.num_experts if mixture is not None else 0
        self.chosen = mixture.choice.num_experts_per_tok if mixture is not None else 0
        self.corrected = mixture is not None and mixture.choice.corrected
        self.counts = torch.zeros(len(self.layers), experts, dtype=torch.int64)
        """Counts of the last update that was performed; zeros before the first."""

    @property
    def state(self) -> dict[str, Tensor]:
        """What the next update depends on, by name; shares storage."""
        if not self.layers:
            return {}
        biases = {
            f"{name}.e_score_correction_bias": router.e_score_correction_bias
            for name, router in self.names.items()
            if self.corrected
        }
        return {COUNTS: self.counts, **biases}

    def beside(self, stages: Mapping[int, nn.Module]) -> "Balancer":
        """Build a balancer that shares the counts, for other stages of the same model."""
        other = Balancer(stages, self.mixture, self.groups, self.balance)
        other.counts = self.counts
        return other

    @contextmanager
    def count_tokens(self, tokens: int, scale: float = 1.0) -> Iterator[None]:
        """Count forwards and backwards inside the block, and bring the losses' gradients along.

        Args:
            tokens: of the whole update.
            scale: what all gradients of the update are multiplied by.
        """
        if not self.layers:  # a dense model
            yield
            return
        documents, each = Documents(), len(self.layers) * tokens
        rate = (self.balance.coefficient or 0.0) * self.counts.shape[1] / each
        z_rate = self.balance.z_coefficient / each
        known = bool(self.counts.any())
        for row, router in self.rows.items():
            load = None
            if self.balance.method == "step":
                load = self.counts[row].double() * self.chosen / max(1, int(self.counts[row].sum()))
                load = load.to(
                    router.weight.device, torch.promote_types(router.weight.dtype, torch.float32)
                )
            router.account = Account(
                self.counts.shape[1],
                documents,
                rate=rate if known or load is None else 0.0,
                z_rate=z_rate,
                load=load,
                scale=scale,
                device=self.groups.device,
            )
        try:
            yield
        except BaseException:
            self._close()
            raise

    def expert_load(self, tokens: int) -> ExpertLoad | None:
        """Routing of the step's tokens, summed over all processes; all of them call it."""
        if not self.layers:
            return None
        device = self.groups.device
        counts = torch.zeros(self.counts.shape, dtype=torch.int64, device=device)
        facts = torch.zeros(len(self.layers), NOTED + self.counts.shape[1], device=device)
        for row, router in self.rows.items():
            assert router.account is not None
            if router.everywhere and self.groups.place.tensor > 0:
                continue
            counts[row] = router.account.counts
            facts[row, :NOTED] = router.account.sums
            if self.corrected and self.groups.place.tensor == 0 and self.groups.token_rank == 0:
                facts[row, NOTED:] = router.e_score_correction_bias
        self._close()
        counts = self.groups.all_reduce(counts).cpu()
        facts = self.groups.all_reduce(facts).cpu()
        return ExpertLoad(
            layers=self.layers,
            counts=counts,
            entropy=tuple((facts[:, 0] / tokens).tolist()),
            balance_loss=float(facts[:, 1].sum()),
            z_loss=float(facts[:, 2].sum()),
            bias=facts[:, NOTED:] if self.corrected else None,
            ranks=self.groups.layout.expert,
        )

    @torch.no_grad()
    def update_bias(self, load: ExpertLoad | None) -> None:
        """Store the counts of a step and adjust the bias by them; None for a skipped step.

        An expert's bias rises by the rate where fewer tokens chose it than the mean, and falls
        where more did; as whole numbers, sign(total - E · count).
        """
        if load is None:
            return
        self.counts.copy_(load.counts)
        if self.balance.method != "bias":
            return
        total, experts = load.counts.sum(1, keepdim=True), load.counts.shape[1]
        steps = (total - experts * load.counts).sign().float() * self.balance.bias_rate
        for row, router in self.rows.items():
            router.e_score_correction_bias += steps[row].to(self.groups.device)

    def _close(self) -> None:
        for router in self.rows.values():
            router.account = None
