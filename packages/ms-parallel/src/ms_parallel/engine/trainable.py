"""Trainable parameters of an engine, with their gradients and their optimizer."""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from ms_parallel.cluster.groups import Groups
from ms_parallel.engine.gradients import is_counted, scale, squared_norm
from ms_parallel.engine.row_check import TERMS
from ms_parallel.models.plan import ModelPlan
from ms_parallel.models.weight_names import WeightRules
from ms_parallel.optim.clipping import CLIP_EPSILON, StepLimits, UpdateDecision
from ms_parallel.optim.grouped import GroupedOptimizer
from ms_parallel.optim.optimizer import OptimizerConfig
from ms_parallel.optim.rule import LocalParameters
from ms_parallel.split.part import is_plain_tensor
from ms_parallel.split.tensor_parallel import has_partial_gradient


class Trainable:
    """Local parameters by name, and their optimizer.

    Gradients of unsharded parameters are summed over the ranks that shard the other parameters, and
    count once in the gradient norm.

    Args:
        stages: this process's stages by number.
        plan: parallel plan of the model.
        placement: pipeline rank of each stage.
        groups: process groups of the layout.
        config: optimizer settings.
        weights: returns the weight rules of the model.
        include_frozen: include parameters without gradients.
        offload: keep optimizer moments in host memory.
        summed: sum gradients over processes in the backward pass; False leaves it to the caller.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        plan: ModelPlan,
        placement: Sequence[int],
        groups: Groups,
        config: OptimizerConfig,
        *,
        weights: Callable[[], WeightRules],
        include_frozen: bool,
        offload: bool = False,
        summed: bool = True,
    ) -> None:
        self.plan, self.placement, self.groups = plan, placement, groups
        self.parameters: dict[str, Tensor] = {
            name: parameter
            for stage in stages.values()
            for name, parameter in stage.named_parameters()
            if parameter.requires_grad or include_frozen
        }
        # Cached: matching hundreds of names against patterns is too slow for every step.
        self.replicated = [
            name
            for name in self.parameters
            if groups.layout.tensor > 1 and has_partial_gradient(name, plan)
        ]
        unsharded = {
            name: parameter
            for name, parameter in self.parameters.items()
            if groups.layout.shards > 1 and is_plain_tensor(parameter)
        }
        # FSDP does not manage plain parameters, so their gradients are summed over its ranks
        # here.
        for parameter in unsharded.values() if summed else ():
            parameter.register_hook(self._sum_over_shards)  # type: ignore[no-untyped-call]
        # Each element of each parameter counts on exactly one process.
        self.counted = [
            name
            for name in self.parameters
            if groups.is_first_replica
            and is_counted(name, plan, placement, groups)
            and (name not in unsharded or groups.token_rank == 0)
        ]
        all_parameters = [
            parameter for stage in stages.values() for parameter in stage.parameters()
        ]
        params = LocalParameters(
            parameters=self.parameters, plan=plan, groups=groups, weights=weights, offload=offload
        )
        self.optimizer = GroupedOptimizer(params, config, all_parameters)

    def _sum_over_shards(self, gradient: Tensor) -> Tensor:
        # Cloned, because a hook must not change its argument.
        return self.groups.all_reduce(gradient.contiguous().clone(), "shards")

    def squared_norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return the sum of squares of the locally counted gradients, a float32 scalar."""
        return squared_norm([gradients[name] for name in self.counted], self.groups.device)

    def apply(self, gradients: Mapping[str, Tensor] | None, norm: float, rate: float) -> None:
        """Clip gradients with this global L2 norm in place, and update the parameters.

        None skips the update but still runs torch's optimizer hooks, which profilers use to count
        steps.
        """
        limit = self.optimizer.config.max_grad_norm
        if gradients is not None and limit is not None and norm > limit:
            scale(list(gradients.values()), limit / (norm + CLIP_EPSILON))
        self.optimizer.step(gradients, rate)

    def queue(
        self, gradients: Mapping[str, Tensor], sums: Tensor, limits: StepLimits, rate: float
    ) -> bool:
        """Queue an update that the device itself clips or skips, if the optimizer supports it.

        Args:
            gradients: local gradients by name.
            sums: vector of `Reduction.totals`.
            limits: limits of the step.
            rate: learning rate.

        Returns:
            Whether it is queued; the caller then increases the optimizer's `update_count` if the
            update was not skipped.
        """
        if not self.optimizer.decides_on_device:
            return False
        decision = UpdateDecision.of(
            sums[:-TERMS], sums[-TERMS:], limits, self.optimizer.config.max_grad_norm
        )
        self.optimizer.step(gradients, rate, decision)
        return True

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None
