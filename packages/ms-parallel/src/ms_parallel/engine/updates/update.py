"""What one update did."""

from collections.abc import Mapping
from typing import Literal

from attrs import field, frozen

from ms_parallel.engine.balance.balancer import ExpertLoad
from ms_parallel.engine.updates.audit import Audit
from ms_parallel.split.context.splitter import ContextLoad


@frozen(kw_only=True)
class Update:
    """What one update did; the same on every process."""

    loss: float
    """Mean loss over the global batch; NaN where nothing had a loss."""
    grad_norm: float
    """Euclidean norm of the whole gradient, before it was clipped; NaN where nothing had a loss."""
    learning_rate: float
    tokens: int
    """Tokens of the global batch."""
    skipped: Literal["no_targets", "nonfinite", "overflow", "refused"] | None = None
    """Why weights, moments and the learning rate's course are as before: nothing had a loss; the
    gradient was not finite; it overflowed in float16, and the loss's scale is lower now; or
    `refuse` said so. None where the update was performed."""
    loss_scale: float | None = None
    """What gradients were multiplied by while they were in float16; None in other precisions."""
    statistics: Mapping[str, float] = field(factory=dict)
    """The loss's statistics, by name, each divided by the global weight."""
    mtp_losses: tuple[float, ...] = ()
    """Mean loss of each layer that predicts further, over its own targets; 0 where it has none."""
    experts: ExpertLoad | None = None
    """How tokens were shared out over experts; None without any, or where nothing had a loss."""
    context: ContextLoad | None = None
    """How evenly this data rank's last microbatch was shared out over the context axis, if it was;
    the only value that differs between data ranks."""
    audit: Audit | None = None
    """The same update in float32, where one was due; None where this one was not finite."""
