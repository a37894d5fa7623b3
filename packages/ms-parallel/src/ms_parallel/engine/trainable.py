"""Trainable parameters of an engine, with their gradients and their optimizer."""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ms_parallel.cluster.groups import Groups
from ms_parallel.engine.gradients import is_counted, scale, squared_norm
from ms_parallel.engine.row_check import TERMS
from ms_parallel.models.plan import ModelPlan
from ms_parallel.models.weight_names import WeightRules
from ms_parallel.optim.clipping import CLIP_EPSILON, StepLimits, UpdateDecision
from ms_parallel.optim.grouped import GroupedOptimizer
from ms_parallel.optim.optimizer import OptimizerConfig
from ms_parallel.optim.rule import LocalParameters
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
        self.unsharded = unsharded_axes(self.parameters, groups)
        """Axis to sum over, by name: parameters whose gradients FSDP does not sum."""
        # Each element of each parameter counts on exactly one process.
        self.counted = [
            name
            for name in self.parameters
            if groups.is_first_replica
            and is_counted(name, plan, placement, groups)
            and _is_first(self.unsharded.get(name), groups)
        ]
        all_parameters = [
            parameter for stage in stages.values() for parameter in stage.parameters()
        ]
        params = LocalParameters(
            parameters=self.parameters, plan=plan, groups=groups, weights=weights, offload=offload
        )
        self.optimizer = GroupedOptimizer(params, config, all_parameters)

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


def unsharded_axes(parameters: Mapping[str, Tensor], groups: Groups) -> dict[str, str]:
    """Return the axis over which to sum each gradient that FSDP does not, by parameter name.

    FSDP manages no parameter that was added after it wrapped the model, such as an adapter: these
    are plain tensors, or split over the tensor and expert axes only.
    """
    axes = {}
    for name, parameter in parameters.items() if groups.layout.shards > 1 else ():
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        dims = set((mesh and mesh.mesh_dim_names) or ())
        if dims <= {"tensor", "expert"}:
            # Expert weights are replicated only over this part of the processes.
            axes[name] = "expert_shards" if "expert" in dims else "shards"
    return axes


def _is_first(axis: str | None, groups: Groups) -> bool:
    """Return True if this process is the first with this part of an unsharded parameter."""
    if axis is None:
        return True
    return (
        groups.token_rank == 0 if axis == "shards" else groups.expert_shards.get_local_rank() == 0
    )
