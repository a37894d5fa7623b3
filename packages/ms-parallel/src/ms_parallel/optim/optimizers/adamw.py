"""AdamW (Loshchilov and Hutter, 2019), with torch's fused kernel where available."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from attrs import evolve, field, frozen
from torch import Tensor
from torch.nn.functional import pad
from torch.optim.adamw import adamw

from ms_parallel.optim.clipping import UpdateDecision
from ms_parallel.optim.optimizer import (
    MIN_DIVISOR,
    OptimizerConfig,
    ParameterGroup,
    betas,
    kind_of,
)
from ms_parallel.optim.rule import LocalParameters, Moments, UpdateRule
from ms_parallel.settings import number
from ms_parallel.split.part import local_part

FUSED_DEVICES = {"cpu", "cuda"}
VISIT_BYTES = 64 << 20
"""Minimum size of the offloaded moments that are copied to the device at once."""
UNIT = 16
"""Elements in the widest CPU vector. torch rounds the remainder after the last full vector
differently, so weights would depend on how they are sharded."""


@frozen(kw_only=True)
class AdamWConfig(OptimizerConfig):
    """AdamW (Loshchilov and Hutter, 2019) with a linear warm-up and a decay.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
    """

    betas: tuple[float, float] = field(default=(0.9, 0.95), converter=betas)
    """Decay of the first and second moment."""
    offloads: ClassVar[bool] = True
    eps: float = field(default=1e-8, validator=number(minimum=MIN_DIVISOR))
    """Term added to the root of the second moment."""

    def rules(self, params: LocalParameters) -> list[UpdateRule]:
        """Build a rule per parameter group, separately for matrices and vectors."""
        return adamw_rules(self, params)


def adamw_rules(
    config: OptimizerConfig,
    params: LocalParameters,
    names: Iterable[str] | None = None,
    ratio: float = 1.0,
) -> list[UpdateRule]:
    """Build AdamW rules for some of the parameters.

    Args:
        config: settings that include `betas` and `eps`.
        params: all local parameters.
        names: parameters to update; None for all.
        ratio: factor on each group's learning rate.
    """
    parameter_groups = (
        evolve(group, rate=group.rate * ratio) for group in config.parameter_groups(params, names)
    )
    return [
        AdamWRule(params.parameters, group, offload=params.offload) for group in parameter_groups
    ]


class AdamWRule:
    """AdamW on local shards, with float32 moments.

    Args:
        parameters: parameters by name.
        group: group of parameters to update.
        offload: keep moments in host memory and copy them to the device for the update; results
            are bit-identical.
    """

    unsharded: Moments = {}  # noqa: RUF012 - always empty

    def __init__(
        self, parameters: Mapping[str, Tensor], group: ParameterGroup, *, offload: bool = False
    ) -> None:
        self.group, self.offload = group, offload
        self.parameters = {name: parameters[name] for name in group.names}
        local = {name: local_part(parameter) for name, parameter in self.parameters.items()}
        self.first = {name: self._zeros(part) for name, part in local.items()}
        self.second = {name: self._zeros(part) for name, part in local.items()}
        self.fused = {part.device.type for part in local.values()} <= FUSED_DEVICES

    @property
    def moments(self) -> Moments:
        """First and second moments."""
        return {"exp_avg": self.first, "exp_avg_sq": self.second}

    @property
    def decides_on_device(self) -> bool:
        """Whether the fused kernel of an accelerator makes the update."""
        devices = {local_part(parameter).device.type for parameter in self.parameters.values()}
        return self.fused and "cpu" not in devices

    def apply(self, gradients: Mapping[str, Tensor], rate: float, update_count: int) -> None:
        """Update the parameters in place."""
        self._apply(gradients, rate, update_count, None)

    def apply_decision(
        self,
        gradients: Mapping[str, Tensor],
        rate: float,
        update_count: int,
        decision: UpdateDecision,
    ) -> None:
        """Update the parameters in place if `decision` says so."""
        self._apply(gradients, rate, update_count, decision)

    def _apply(
        self,
        gradients: Mapping[str, Tensor],
        rate: float,
        update_count: int,
        decision: UpdateDecision | None,
    ) -> None:
        parts = {name: local_part(parameter) for name, parameter in self.parameters.items()}
        # Shards of small weights are empty on some ranks.
        nonempty = [name for name, part in parts.items() if part.numel()]
        if not nonempty:
            return
        for names in self._visits(parts, nonempty):
            self._update(names, parts, gradients, rate, update_count, decision)

    def _zeros(self, part: Tensor) -> Tensor:
        """Allocate a moment of a shard, in pinned host memory if offloaded."""
        if not self.offload or part.device.type in ("cpu", "meta"):
            return torch.zeros_like(part)
        return torch.zeros_like(part, device="cpu").pin_memory()

    def _visits(self, parts: Mapping[str, Tensor], params: Sequence[str]) -> Iterator[list[str]]:
        """Yield groups of weights that are updated together; offloaded moments in small groups."""
        if not self.offload:
            yield list(params)
            return
        batch: list[str] = []
        size = 0
        for name in params:
            batch.append(name)
            size += parts[name].nbytes
            if 2 * size >= VISIT_BYTES:  # two moments of the same size
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _update(
        self,
        names: Sequence[str],
        parts: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        rate: float,
        update_count: int,
        decision: UpdateDecision | None,
    ) -> None:
        """Update some parameters and their moments in place."""
        stored_moments = [(self.first[name], self.second[name]) for name in names]
        rows = [
            [parts[name], gradients[name], *(m.to(parts[name].device) for m in moments)]
            for name, moments in zip(names, stored_moments, strict=True)
        ]
        # CPU kernel only: pad to full vectors, so that the result is independent of the sharding.
        needs_padding = self.fused and rows[0][0].device.type == "cpu"
        filled = [_filled(row) if needs_padding and row[0].numel() % UNIT else row for row in rows]
        self._step(filled, rate, update_count, decision)
        for row, padded_row in zip(rows, filled, strict=True):
            if padded_row is not row:
                for tensor, longer in zip(row, padded_row, strict=True):
                    tensor.copy_(longer[: tensor.numel()].view_as(tensor))
        for row, moments in zip(rows, stored_moments, strict=True):
            for stored, updated in zip(moments, row[2:], strict=True):
                if stored is not updated:  # offloaded: copy back to host memory
                    stored.copy_(updated)

    def _step(
        self,
        rows: Sequence[Sequence[Tensor]],
        rate: float,
        update_count: int,
        decision: UpdateDecision | None,
    ) -> None:
        """Update weights in place; a row is (weight, gradient, first moment, second moment)."""
        weights, gradients, first, second = map(list, zip(*rows, strict=True))
        device = weights[0].device if self.fused else "cpu"
        adamw(
            weights,
            gradients,
            first,
            second,
            [],  # max_exp_avg_sqs, for amsgrad only
            # state_steps: torch adds 1 before use, so update 0 is corrected by 1 - β.
            list(torch.full((len(weights),), float(update_count), device=device).unbind()),
            foreach=False if self.fused else None,
            fused=self.fused,
            grad_scale=None if decision is None else decision.grad_scale,
            found_inf=None if decision is None else decision.found_inf,
            amsgrad=False,
            beta1=self.group.config.betas[0],
            beta2=self.group.config.betas[1],
            lr=rate * self.group.rate,
            weight_decay=self.group.weight_decay,
            eps=self.group.config.eps,
            maximize=False,
        )


def _filled(row: Sequence[Tensor]) -> list[Tensor]:
    """Copy to flat tensors, zero-padded so that the kernel has no scalar remainder loop."""
    return [pad(tensor.flatten(), (0, -tensor.numel() % UNIT)) for tensor in row]


KINDS = {"AdamW": kind_of(AdamWConfig)}
