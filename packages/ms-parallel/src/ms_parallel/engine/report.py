"""Results of an optimizer step: per microbatch, summed over microbatches, and the step's report."""

from collections.abc import Mapping, Sequence
from math import nan, sqrt
from typing import Literal

import torch
from attrs import field, frozen
from torch import Tensor

from ms_parallel.engine.audit import AuditResult
from ms_parallel.engine.balance.balancer import ExpertLoad
from ms_parallel.engine.row_check import TERMS, Fingerprint
from ms_parallel.split.context.splitter import ContextLoad

Skipped = Literal["no_targets", "nonfinite", "overflow", "refused"]


@frozen(kw_only=True, eq=False)
class MicrobatchResult:
    """Outputs of the last stage for one microbatch; detached."""

    loss: Tensor
    """(), contribution to the global batch's mean loss."""
    metrics: Tensor
    """(M,), contributions to the loss's statistics; M = 0 without statistics."""
    mtp_losses: Tensor
    """(D,), contributions to the mean loss of each MTP layer; D = 0 without MTP."""

    @property
    def values(self) -> Tensor:
        """(1 + M + D,): everything that is summed over microbatches."""
        return torch.cat((self.loss[None], self.metrics, self.mtp_losses))


@frozen(kw_only=True)
class StepCounts:
    """Counts of the global batch, taken before the forward pass."""

    weight: float
    """Loss weight: divisor of the summed loss."""
    tokens: int
    local: Fingerprint
    """Checksums of this process's rows."""
    by_data_rank: Sequence[tuple[int, int]]
    """`Fingerprint.numbers` of each data rank's rows."""


@frozen(kw_only=True)
class StepTotals:
    """Sums over the global batch, on the host; the same on every process."""

    grad_norm: float
    loss: float
    metrics: tuple[float, ...]
    mtp_losses: tuple[float, ...]
    row_terms: tuple[float, ...]
    """Sums of `RowCheck.terms`; 0 unless rows look wrong."""

    @classmethod
    def of(cls, sums: Tensor, metrics: int) -> "StepTotals":
        """Build from the vector of `Reduction.totals` on the CPU, with this many statistics."""
        squared_norm, loss, *other_sums = sums[:-TERMS].tolist()
        return cls(
            grad_norm=sqrt(squared_norm),
            loss=loss,
            metrics=tuple(other_sums[:metrics]),
            mtp_losses=tuple(other_sums[metrics:]),
            row_terms=tuple(sums[-TERMS:].tolist()),
        )


@frozen(kw_only=True)
class StepReport:
    """Result of one optimizer step; the same on every process."""

    loss: float = nan
    """Mean loss over the global batch; NaN if no position had a target."""
    grad_norm: float = nan
    """Global L2 norm of the gradient before clipping; NaN if no position had a target."""
    learning_rate: float
    tokens: int
    """Tokens of the global batch."""
    skipped: Skipped | None = None
    """Reason why the update was skipped: no position had a target; the gradient was not finite; it
    overflowed in float16 (the loss scale is then lowered); or it exceeded a limit. Weights,
    optimizer state and learning rate schedule are unchanged. None if the update was applied."""
    loss_scale: float | None = None
    """Factor on the loss in float16; None in other precisions."""
    statistics: Mapping[str, float] = field(factory=dict)
    """The loss's statistics by name, each divided by the global weight."""
    mtp_losses: tuple[float, ...] = ()
    """Mean loss of each multi-token-prediction layer over its own targets; 0 if it has none."""
    experts: ExpertLoad | None = None
    """Routing of tokens to experts; None without experts, or if no position had a target."""
    context: ContextLoad | None = None
    """Balance of the context axis for this data rank's last microbatch, if the axis is used; the
    only value that differs between data ranks."""
    audit: AuditResult | None = None
    """Comparison with the same step in float32, if an audit was due and the step was finite."""
