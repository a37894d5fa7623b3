"""Optimizer of an engine, composed of rules that update subsets of the parameters."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ms_parallel.optim.clipping import UpdateDecision
from ms_parallel.optim.optimizer import OptimizerConfig
from ms_parallel.optim.rule import DeviceDecidedRule, LocalParameters, Moments


class GroupedOptimizer(torch.optim.Optimizer):
    """Rules over the local parts of the weights, as a torch optimizer.

    Local tensors avoid DTensor dispatch, and let one fused call update parameters on different
    meshes. It subclasses torch's optimizer so that torch's hooks, and profilers that use them, see
    each update; `state_dict` is not used.

    Args:
        params: parameters to update.
        config: optimizer settings.
        weights: all weights of the models, including frozen ones.
    """

    def __init__(
        self, params: LocalParameters, config: OptimizerConfig, weights: Iterable[Tensor] = ()
    ) -> None:
        all_params = list(dict.fromkeys((*params.parameters.values(), *weights)))
        super().__init__([{"params": all_params}], {})
        self.config = config
        self.rules = config.rules(params)
        self.update_count = 0
        """Number of performed updates; skipped ones do not count toward bias correction."""

    @property
    def moments(self) -> Moments:
        """State with the shape of its parameter's local shard, by state and parameter name."""
        return _merge(rule.moments for rule in self.rules)

    @property
    def unsharded(self) -> Moments:
        """State with any other shape (it is not sharded), by state and parameter name."""
        return _merge(rule.unsharded for rule in self.rules)

    @property
    def decides_on_device(self) -> bool:
        """Whether `step` accepts a decision."""
        return all(
            isinstance(rule, DeviceDecidedRule) and rule.decides_on_device for rule in self.rules
        )

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        gradients: Mapping[str, Tensor] | None,
        rate: float,
        decision: UpdateDecision | None = None,
        closure: Any = None,
    ) -> None:
        """Update the parameters in place.

        Args:
            gradients: local part of each gradient by name; None for a skipped update.
            rate: learning rate.
            decision: decision on the device, if `decides_on_device`; the caller then increases
                `update_count` once the host knows it. None to update.
            closure: unused.
        """
        # torch wraps this method, so its hooks run for a skipped update too.
        if gradients is None:
            return
        for rule in self.rules:
            if decision is None:
                rule.apply(gradients, rate, self.update_count)
            else:
                assert isinstance(rule, DeviceDecidedRule)
                rule.apply_decision(gradients, rate, self.update_count, decision)
        self.update_count += decision is None


def _merge(every: Iterable[Moments]) -> dict[str, dict[str, Tensor]]:
    merged: dict[str, dict[str, Tensor]] = {}
    for moments in every:
        for moment, tensors in moments.items():
            merged.setdefault(moment, {}).update(tensors)
    return merged
