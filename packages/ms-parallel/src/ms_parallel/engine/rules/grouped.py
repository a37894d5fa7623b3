"""The optimizer of an engine: rules, each of which updates some of the parameters."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ms_parallel.engine.optimizer import OptimizerConfig
from ms_parallel.engine.rules.rule import Held, Moments


class GroupedOptimizer(torch.optim.Optimizer):
    """Rules over the parts of the weights that this process holds.

    Working on local tensors costs no DTensor dispatch, and lets parameters that lie on different
    meshes be updated in one fused call. It is an optimizer of torch's, so that torch's hooks, and
    profilers through them, see each update; its own `state_dict` is not used.

    Args:
        held: what is updated.
        config: the optimizer's settings.
        weights: all weights of the models that they belong to, frozen ones too.
    """

    def __init__(self, held: Held, config: OptimizerConfig, weights: Iterable[Tensor] = ()) -> None:
        every = list(dict.fromkeys((*held.parameters.values(), *weights)))
        super().__init__([{"params": every}], {})
        self.config = config
        self.rules = config.rules(held)
        self.taken = 0
        """Updates that were performed; a skipped one does not count towards bias correction."""

    @property
    def moments(self) -> Moments:
        """Tensors that lie beside a parameter, by moment and parameter."""
        return _joined(rule.moments for rule in self.rules)

    @property
    def whole(self) -> Moments:
        """Tensors of another shape, of which a process has all or nothing."""
        return _joined(rule.whole for rule in self.rules)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, gradients: Mapping[str, Tensor] | None, rate: float, closure: Any = None
    ) -> None:
        """Update the parameters in place.

        Args:
            gradients: this process's part of each, by name; None for an update that is skipped.
            rate: the learning rate.
            closure: not used.
        """
        if gradients is None:
            return
        for rule in self.rules:
            rule.apply(gradients, rate, self.taken)
        self.taken += 1


def _joined(every: Iterable[Moments]) -> dict[str, dict[str, Tensor]]:
    found: dict[str, dict[str, Tensor]] = {}
    for moments in every:
        for moment, tensors in moments.items():
            found.setdefault(moment, {}).update(tensors)
    return found
