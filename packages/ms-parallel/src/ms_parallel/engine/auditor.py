"""Recomputation of a step in float32, from the weights that the optimizer updates.

The stages are built a second time on the meta device, and share the engine's float32 weights. An
audit therefore needs memory for only one more gathered block and one more set of gradients. The
engine's own stages, with their casts and hooks, are not involved.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from math import isfinite

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ms_parallel.cluster.groups import Groups
from ms_parallel.engine.audit import LEVELS, AuditResult, GroupComparison
from ms_parallel.engine.balance.balancer import ExpertBalancer
from ms_parallel.engine.gradients import reduce_gradients
from ms_parallel.engine.loss import Loss, LossWithStatistics
from ms_parallel.engine.reduction import SummedReduction
from ms_parallel.engine.report import StepCounts, StepTotals
from ms_parallel.engine.stage_runner import StageRunner
from ms_parallel.engine.trainable import Trainable
from ms_parallel.models.batch import Batch
from ms_parallel.split.part import local_part, wrap_like

GROUP = re.compile(r"(.*\blayers\.\d+\.[^.]+|.*(?=\.[^.]+$))")
"""Model part of a parameter: a module of a layer, such as its MLP, or one outside the layers."""


class NoAuditor:
    """Default: audits no step."""

    def is_due(self, step: int) -> bool:
        """Return False."""
        return False

    def audit(self, *step: object) -> None:
        """Return no audit."""


class Auditor:
    """Compares gradients with float32 gradients of the same batch.

    Args:
        stages: the engine's stages, which compute in its precision.
        trained: their trainable parameters.
        balancer: their routers.
        build: builds the stages again, in float32 on the meta device.
        precision: the audited precision.
        every: number of updates between audits.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        trained: Trainable,
        balancer: ExpertBalancer,
        build: Callable[[], StageRunner],
        precision: str,
        every: int,
    ) -> None:
        self.stages, self.trained, self.balancer, self.build = stages, trained, balancer, build
        self.levels, self.every = LEVELS[precision], every
        self.groups = self._gather_groups()

    def _gather_groups(self) -> list[str]:
        """Gather the group names of all processes in one order."""
        gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        local_names = list(dict.fromkeys(map(group_of, self.trained.counted)))
        dist.all_gather_object(gathered, local_names)
        return list(dict.fromkeys(name for names in gathered for name in names))

    def is_due(self, step: int) -> bool:
        """Whether step number `step`, from 1, is audited."""
        return step % self.every == 0

    def audit(
        self,
        step: int,
        microbatches: Sequence[Batch],
        loss: Loss | LossWithStatistics,
        counts: StepCounts,
        totals: StepTotals,
        gradients: Mapping[str, Tensor],
    ) -> AuditResult | None:
        """Compute a step again in float32 and compare; every process calls it.

        Args:
            step: number of the step, from 1.
            microbatches: this data rank's rows.
            loss: loss of each microbatch.
            counts: counts of the global batch.
            totals: loss and gradient norm in the engine's precision.
            gradients: local part of each gradient, unscaled and not clipped.

        Returns:
            The comparison; None if no audit is due or the gradient is not finite.
        """
        if not self.is_due(step) or not isfinite(totals.grad_norm):
            return None
        runner, trained = self.build(), self.trained
        parameters = {
            name: parameter
            for number, stage in runner.stages.items()
            for name, parameter in share_weights(stage, self.stages[number], trained).items()
        }
        balancer = self.balancer.for_stages(runner.stages)
        with balancer.count_tokens(counts.tokens):
            results = runner.forward_backward(
                microbatches, loss, counts.weight, SummedReduction(trained)
            )
        balancer.reduce()
        groups = trained.groups
        # The same reductions as in the step, so both gradients are sharded alike.
        exact = reduce_gradients(
            {name: parameters[name] for name in trained.parameters},
            trained.replicated,
            trained.unsharded,
            trained.plan.tied,
            trained.placement,
            groups,
        )
        # Loss, then per group |g - e|², (g - e)·e and |e|²; summed in one all-reduce.
        facts = torch.zeros(1 + 3 * len(self.groups), device=groups.device)
        if results and groups.place.is_loss_rank:
            facts[0] = torch.stack([result.loss for result in results]).sum()
        self._compare(gradients, exact, facts[1:].view(-1, 3))
        return self._audit(totals.loss, groups, facts)

    def _compare(
        self, gradients: Mapping[str, Tensor], exact: Mapping[str, Tensor], sums: Tensor
    ) -> None:
        """Add |g - e|², (g - e)·e and |e|² of locally counted gradients to each group's sums."""
        rows = {name: row for row, name in enumerate(self.groups)}
        for name in self.trained.counted:
            row, reference = sums[rows[group_of(name)]], exact[name].float()
            difference = gradients[name].float() - reference
            row += torch.stack(
                [
                    difference.square().sum(),
                    (difference * reference).sum(),
                    reference.square().sum(),
                ]
            )

    def _audit(self, loss: float, groups: Groups, facts: Tensor) -> AuditResult:
        loss_float32, *sums = groups.all_reduce(facts).tolist()
        # Three sums per group, as in `_compare`; the minimum avoids a division by 0.
        total = max(sum(sums[2::3]), 1e-60)
        return AuditResult(
            loss=loss,
            loss_float32=loss_float32,
            groups={
                name: GroupComparison(
                    error=(squared_error / max(square, 1e-60)) ** 0.5,
                    gain=along / max(square, 1e-60),
                    share=(square / total) ** 0.5,
                )
                for name, squared_error, along, square in zip(
                    self.groups, sums[0::3], sums[1::3], sums[2::3], strict=True
                )
            },
            levels=self.levels,
        )


def group_of(name: str) -> str:
    """Return the group of a parameter.

    >>> group_of("model.layers.3.self_attn.q_proj.weight")
    'model.layers.3.self_attn'
    >>> group_of("lm_head.weight")
    'lm_head'
    """
    match = GROUP.match(name)
    return match[1] if match else name


def share_weights(stage: nn.Module, source: nn.Module, trained: Trainable) -> dict[str, Tensor]:
    """Replace the parameters and buffers of a meta stage by the engine's, in place.

    Returns:
        Parameters by name; they share storage with the engine's weights, but not gradients.
    """
    parameters: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, empty in list(stage.named_parameters(remove_duplicate=False)):
            local = local_part(trained.parameters[name])
            parameter = nn.Parameter(wrap_like(empty, local), empty.requires_grad)
            _set(stage, name, "_parameters", parameter)
            parameters[name] = parameter
        for name, buffer in source.named_buffers(remove_duplicate=False):
            _set(stage, name, "_buffers", buffer)
    return parameters


def _set(stage: nn.Module, name: str, table: str, tensor: Tensor) -> None:
    parent, _, last = name.rpartition(".")
    getattr(stage.get_submodule(parent), table)[last] = tensor
