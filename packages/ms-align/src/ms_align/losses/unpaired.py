"""Formulas and settings of losses of labeled responses: KTO and its variants, with TRL's names.

Shapes: B rows. In formulas, r is the log-ratio log π/π_ref of a response, and s its sign: 1 if it
is desirable, -1 if not. A new loss is one function here and its entry in `LOSSES`.

This module does not import torch, so that a mistake in a run file is reported at once.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Literal

from attrs import Attribute, field, frozen

from ms_align.errors import ConfigError
from ms_align.losses.preference import log_sigmoid
from ms_align.settings import nearest, number, short_repr

if TYPE_CHECKING:
    from torch import Tensor

Baseline = Literal["kl", "reward_mean", "none"]
"""Baseline that a loss subtracts: the KL of policy from reference, estimated on mismatched
responses of the global batch, at least 0; the mean of all rewards β·r of the run, including the
current batch; or none."""


@frozen(kw_only=True)
class LabeledRows:
    """Inputs of a loss, (B,) each."""

    log_ratios: "Tensor"
    """r, summed over target tokens; float32."""
    signs: "Tensor"
    """s: 1 or -1."""
    baseline: "Tensor"
    """Value of the loss's `Baseline`, without gradient; 0 without one."""


UnpairedLoss = Callable[[LabeledRows, "KTOOptions"], "Tensor"]
"""Computes the loss of each row, (B,)."""


def kto(rows: LabeledRows, options: "KTOOptions") -> "Tensor":
    """1 - σ(s·β·(r - z)) with z the KL: Ethayarajh et al., 2024, equation 8."""
    return (-rows.signs * options.beta * (rows.log_ratios - rows.baseline)).sigmoid()


def apo_zero_unpaired(rows: LabeledRows, options: "KTOOptions") -> "Tensor":
    """1 - σ(s·β·r): APO for answers better than the model's, D'Oosterlinck et al., 2024."""
    return (-rows.signs * options.beta * rows.log_ratios).sigmoid()


def bco(rows: LabeledRows, options: "KTOOptions") -> "Tensor":
    """-log σ(s·(β·r - δ)) with δ the mean reward: BCO, Jung et al., 2024, equation 7."""
    return -log_sigmoid(rows.signs * (options.beta * rows.log_ratios - rows.baseline))


LOSSES: Final[dict[str, tuple[UnpairedLoss, Baseline]]] = {
    "kto": (kto, "kl"),
    "apo_zero_unpaired": (apo_zero_unpaired, "none"),
    "bco": (bco, "reward_mean"),
}


def _check_type(instance: Any, attribute: "Attribute[Any]", value: object) -> None:
    """Require a name of `LOSSES`."""
    if not isinstance(value, str) or value not in LOSSES:
        raise ConfigError(f"loss_type is {short_repr(value)}; {nearest(str(value), LOSSES)}")


@frozen(kw_only=True, slots=False)  # the trainer inherits from more than one
class KTOOptions:
    """Settings of KTO and its variants."""

    loss_type: str = field(default="kto", validator=_check_type)
    """Loss: kto, apo_zero_unpaired or bco."""
    beta: float = field(default=0.1, validator=number(minimum=1e-6))
    """β: strength of the constraint to stay near the reference."""
    desirable_weight: float = field(default=1.0, validator=number())
    """Weight of the loss of desirable responses."""
    undesirable_weight: float = field(default=1.0, validator=number())
    """Weight of the loss of undesirable responses."""

    @property
    def baseline(self) -> Baseline:
        """Baseline that the loss reads."""
        return LOSSES[self.loss_type][1]
