"""Policy losses of the GRPO family and their settings, with TRL's names.

Shapes: B responses, S positions. r is the ratio exp(log π - log μ) of policy to sampler, of a token
or of its response (`importance_sampling_level`), and A the advantage. A new loss is one function
here and its entry in `LOSS_TYPES`. TRL's `bnpo` is not offered: its mean over the tokens of a
microbatch depends on how the batch is cut.

This module does not import torch, so that a mistake in a run file is reported at once.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from attrs import Attribute, field, frozen

from ms_align.errors import ConfigError
from ms_align.settings import number, one_of
from ms_align.used_settings import UsedIf

if TYPE_CHECKING:
    from torch import Tensor

Aggregation = Literal["token", "sequence", "constant", "sum"]
"""Mean over all tokens; over each response's tokens, then responses; the sum over each response's
tokens divided by the maximum length; that sum itself. The latter two are means over responses."""


@frozen(kw_only=True)
class Terms:
    """Inputs of a surrogate loss, (B, S) each, and its settings."""

    log_ratios: "Tensor"
    """log r; 0 where masked."""
    logprobs: "Tensor"
    """log π of each token."""
    advantages: "Tensor"
    clip_low: float
    clip_high: float
    options: "SurrogateOptions"


Surrogate = Callable[[Terms], "tuple[Tensor, Tensor]"]
"""Computes the loss of each token and whether its gradient is clipped, (B, S) each."""


def clipped(terms: Terms) -> "tuple[Tensor, Tensor]":
    """-min(r·A, clip(r, 1 - low, 1 + high)·A): Schulman et al., 2017, equation 7.

    With `delta`, r is at most delta in the first product, so that a negative advantage cannot push
    a ratio far above 1 without bound. With `dual_clip`, the loss of a negative advantage is at most
    -c·A (Ye et al., 2020, equation 5).
    """
    ratios, advantages = terms.log_ratios.exp(), terms.advantages
    bounded = ratios if terms.options.delta is None else ratios.clamp(max=terms.options.delta)
    limited = ratios.clamp(1 - terms.clip_low, 1 + terms.clip_high)
    # A loss is minimized, so the pessimistic minimum of the surrogate becomes a maximum.
    losses = (-bounded * advantages).maximum(-limited * advantages)
    # The clip only stops moves that the advantage rewards: up if A > 0, down if A < 0.
    is_clipped = (ratios > 1 + terms.clip_high) & (advantages > 0)
    is_clipped = is_clipped | ((ratios < 1 - terms.clip_low) & (advantages < 0))
    if terms.options.delta is not None:
        is_clipped = is_clipped | ((ratios > terms.options.delta) & (advantages < 0))
    if terms.options.dual_clip is not None:
        ceiling = -terms.options.dual_clip * advantages
        is_above = (advantages < 0) & (losses > ceiling)
        losses = ceiling.where(is_above, losses)
        is_clipped = is_clipped | is_above
    return losses, is_clipped


def cispo(terms: Terms) -> "tuple[Tensor, Tensor]":
    """-sg(min(r, 1 + high))·A·log π: every token keeps a gradient (MiniMax, 2025, equation 4)."""
    ratios = terms.log_ratios.exp().detach()
    weights = ratios.clamp(max=1 + terms.clip_high)
    return -weights * terms.advantages * terms.logprobs, ratios > weights


def sapo(terms: Terms) -> "tuple[Tensor, Tensor]":
    """-(4/t)·σ(t·(r - 1))·A: a soft gate instead of a clip (Gao et al., 2025, equation 5)."""
    ratios, advantages = terms.log_ratios.exp(), terms.advantages
    positive = advantages.new_tensor(terms.options.sapo_temperature_pos)
    negative = advantages.new_tensor(terms.options.sapo_temperature_neg)
    temperatures = positive.where(advantages > 0, negative)
    gate = (temperatures * (ratios - 1)).sigmoid() * 4 / temperatures
    nothing_clipped = ratios.new_zeros(ratios.shape).bool()
    return -gate * advantages, nothing_clipped


LOSS_TYPES: Final[dict[str, tuple[Surrogate, Aggregation]]] = {
    "grpo": (clipped, "sequence"),
    "dapo": (clipped, "token"),
    "dr_grpo": (clipped, "constant"),
    "luspo": (clipped, "sum"),
    "cispo": (cispo, "token"),
    "sapo": (sapo, "sequence"),
}
LEVELS: Final = ("token", "sequence", "sequence_token")


def _check_type(instance: Any, attribute: "Attribute[Any]", value: object) -> None:
    """Require a name of `LOSS_TYPES`."""
    one_of(*LOSS_TYPES)(instance, attribute, value)


def _check_level(instance: Any, attribute: "Attribute[Any]", value: object) -> None:
    """Require a level for which the loss is defined."""
    one_of(*LEVELS)(instance, attribute, value)
    if value != "token" and instance.loss_type == "cispo":
        raise ConfigError(
            f"importance_sampling_level must be 'token' for cispo, got {value!r}; change it or "
            "loss_type"
        )


def _check_clip(instance: Any, attribute: "Attribute[Any]", value: object) -> None:
    """Require a bound of at least 1, and a loss that clips."""
    number(minimum=1.0, optional=True)(instance, attribute, value)
    if value is not None and LOSS_TYPES[instance.loss_type][0] is not clipped:
        raise ConfigError(
            f"{attribute.name} cannot be used with {instance.loss_type}, which does not clip; "
            "remove one of them"
        )


@frozen(kw_only=True, slots=False)  # the trainer inherits from more than one
class SurrogateOptions:
    """Policy loss."""

    loss_type: str = field(default="dapo", validator=_check_type)
    """Loss: grpo, dapo, dr_grpo, luspo, cispo or sapo. The first four are PPO's clipped loss and
    differ in its mean: over each response's tokens, over all tokens, over the maximum length, or
    none."""
    importance_sampling_level: str = field(default="token", validator=_check_level)
    """Ratio of each `token`; of the `sequence`, the geometric mean of its tokens' (GSPO); or
    `sequence_token`, GSPO's value with each token's own gradient."""
    delta: float | None = field(default=None, validator=_check_clip)
    """Upper bound of ratios with negative advantages (two-sided clip), above 1 + clip_high.
    Default: none."""
    dual_clip: float | None = field(default=None, validator=_check_clip)
    """c: the loss of a negative advantage A is at most -c·A. Default: none."""
    sapo_temperature_pos: float = field(default=1.0, validator=number(minimum=1e-6))
    """t of sapo for positive advantages."""
    sapo_temperature_neg: float = field(default=1.05, validator=number(minimum=1e-6))
    """t of sapo for other advantages."""

    used_if: ClassVar[tuple[UsedIf, ...]] = (
        UsedIf(
            "sapo_temperature_pos sapo_temperature_neg",
            "with loss_type='sapo'",
            lambda run: run.loss_type == "sapo",
        ),
        UsedIf("clip_low", "by losses other than cispo and sapo", lambda run: run.has_lower_clip),
        UsedIf("clip_high", "by losses other than sapo", lambda run: run.loss_type != "sapo"),
    )

    @property
    def has_lower_clip(self) -> bool:
        """Whether the loss clips ratios from below."""
        return LOSS_TYPES[self.loss_type][0] is clipped


def at_level(log_ratios: "Tensor", mask: "Tensor", level: str) -> "Tensor":
    """Return the log-ratios that the surrogate reads, (B, S).

    Args:
        log_ratios: of tokens, (B, S); 0 where masked.
        mask: True at response tokens, (B, S).
        level: one of `LEVELS`. Zheng et al., 2025 ("GSPO"), equations 7 and 14.
    """
    if level == "token":
        return log_ratios
    mean = (log_ratios * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    if level == "sequence_token":  # the mean's value, each token's gradient
        return mean.detach() + log_ratios - log_ratios.detach()
    return mean.expand_as(log_ratios)
