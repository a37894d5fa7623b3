"""What a rule is, which updates some of the parameters, and what it is given."""

from collections.abc import Callable, Mapping
from typing import Protocol

from attrs import frozen
from torch import Tensor

from ms_parallel.cluster.groups import Groups
from ms_parallel.models.plan import ModelPlan
from ms_parallel.models.weight_names import Rules

Moments = Mapping[str, Mapping[str, Tensor]]
"""By the name of a moment and of a parameter."""


@frozen(kw_only=True, eq=False)
class Held:
    """The parameters that a process trains, and what is known of them."""

    parameters: Mapping[str, Tensor]
    plan: ModelPlan
    groups: Groups
    weights: Callable[[], Rules]
    """How a folder's tensors make up the parameters, which says what is fused."""
    offload: bool = False
    """Whether moments lie in the machine's memory and not in its device's."""

    def called(self, name: str) -> str:
        """Return a parameter's name in settings, its owner's for a tied copy so that both agree."""
        return {copy: owner for owner, copy in self.plan.tied}.get(name, name)


class Rule(Protocol):
    """Updates some of the parameters; it keeps what it needs from one update to the next."""

    @property
    def moments(self) -> Moments:
        """Tensors that lie beside a parameter, of this process's part of it."""

    @property
    def whole(self) -> Moments:
        """Tensors of another shape, of which a process has all or nothing."""

    def apply(self, gradients: Mapping[str, Tensor], rate: float, taken: int) -> None:
        """Update the parameters in place.

        Args:
            gradients: this process's part of each, by name; others are not touched.
            rate: the learning rate.
            taken: updates that were performed before.
        """
