"""Interface of update rules: each updates a subset of the parameters."""

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

from attrs import frozen
from torch import Tensor

from ms_parallel.cluster.groups import Groups
from ms_parallel.models.plan import ModelPlan
from ms_parallel.models.weight_names import WeightRules
from ms_parallel.optim.clipping import UpdateDecision

Moments = Mapping[str, Mapping[str, Tensor]]
"""Optimizer state by state name, then by parameter name."""


@frozen(kw_only=True, eq=False)
class LocalParameters:
    """Trainable parameters of this process, with their plan and process groups."""

    parameters: Mapping[str, Tensor]
    plan: ModelPlan
    groups: Groups
    weights: Callable[[], WeightRules]
    """Mapping from a folder's tensors to the parameters; it shows which parameters are fused."""
    offload: bool = False
    """Keep optimizer state in host memory."""

    def settings_name(self, name: str) -> str:
        """Return a parameter's name in settings; a tied copy has its owner's name."""
        return {copy: owner for owner, copy in self.plan.tied}.get(name, name)


class UpdateRule(Protocol):
    """Updates a subset of the parameters and owns their optimizer state."""

    @property
    def moments(self) -> Moments:
        """Optimizer state with the shape of its parameter's local shard."""

    @property
    def unsharded(self) -> Moments:
        """Optimizer state with any other shape, such as step counts; it is not sharded."""

    def apply(self, gradients: Mapping[str, Tensor], rate: float, update_count: int) -> None:
        """Update the parameters in place.

        Args:
            gradients: local shards by parameter name; parameters without one are unchanged.
            rate: learning rate.
            update_count: number of earlier updates.
        """


@runtime_checkable
class DeviceDecidedRule(UpdateRule, Protocol):
    """Update rule that supports decisions on the device, which the host does not know yet."""

    @property
    def decides_on_device(self) -> bool:
        """Whether `apply_decision` works on this rule's device."""

    def apply_decision(
        self,
        gradients: Mapping[str, Tensor],
        rate: float,
        update_count: int,
        decision: UpdateDecision,
    ) -> None:
        """Update the parameters in place as in `apply`, if `decision` says so."""
