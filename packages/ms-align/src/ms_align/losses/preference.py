"""Formulas and settings of preference losses: DPO and its variants, with TRL's names.

Shapes: P pairs. In formulas, c and r are the log-ratios log π/π_ref of the chosen and the rejected
answer, and Δ = c - r; with another f-divergence than the reverse KL, `scores` replaces c and r.
A new loss is one function here and its entry in `LOSSES`.

This module does not import torch, so that a mistake in a run file is reported at once.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

from attrs import Attribute, field, frozen

from ms_align.errors import ConfigError
from ms_align.settings import flag, nearest, number, one_of, short_repr
from ms_align.used_settings import UsedIf

if TYPE_CHECKING:
    from torch import Tensor


@frozen(kw_only=True)
class Pairs:
    """Log-probabilities of P pairs of answers, summed over target tokens; float32 (P,) each."""

    chosen: "Tensor"
    rejected: "Tensor"
    reference_chosen: "Tensor"
    """Under the reference; 0 without one."""
    reference_rejected: "Tensor"
    chosen_tokens: "Tensor"
    """Number of target tokens, at least 1."""
    rejected_tokens: "Tensor"

    @property
    def chosen_ratio(self) -> "Tensor":
        """The log-ratio c of the chosen answer."""
        return self.chosen - self.reference_chosen

    @property
    def rejected_ratio(self) -> "Tensor":
        """The log-ratio r of the rejected answer."""
        return self.rejected - self.reference_rejected


PairLoss = Callable[[Pairs, "DPOOptions"], "Tensor"]
"""Computes the loss of each pair, (P,)."""


def scores(pairs: Pairs, options: "DPOOptions") -> "tuple[Tensor, Tensor]":
    """Compute f'(π/π_ref) of the chosen and the rejected answer, (P,) each.

    Wang et al., 2023 ("Beyond Reverse KL"), table 1. The reverse KL gives the log-ratios.
    """
    chosen, rejected = pairs.chosen_ratio, pairs.rejected_ratio
    divergence, alpha = options.f_divergence_type, options.f_alpha_divergence_coef
    if divergence == "forward_kl":  # f'(t) = 1 - 1/t
        return 1 - (-chosen).exp(), 1 - (-rejected).exp()
    if divergence == "js_divergence":  # f'(t) = log(2t / (t + 1))
        return math.log(2) + log_sigmoid(chosen), math.log(2) + log_sigmoid(rejected)
    if divergence == "alpha_divergence" and abs(alpha - 1) >= 1e-6:
        # f'(t) = (t^(a - 1) - 1) / (a - 1); its limit for a -> 1 is log t
        limit = 80.0  # exp(80) is finite in float32
        power_chosen = ((alpha - 1) * chosen).clamp(max=limit).exp()
        power_rejected = ((alpha - 1) * rejected).clamp(max=limit).exp()
        return (power_chosen - 1) / (alpha - 1), (power_rejected - 1) / (alpha - 1)
    return chosen, rejected


def score_difference(pairs: Pairs, options: "DPOOptions") -> "Tensor":
    """Compute Δ, (P,)."""
    chosen, rejected = scores(pairs, options)
    return chosen - rejected


def mean_score_difference(pairs: Pairs, options: "DPOOptions") -> "Tensor":
    """Compute Δ of scores per target token, (P,)."""
    chosen, rejected = scores(pairs, options)
    return chosen / pairs.chosen_tokens - rejected / pairs.rejected_tokens


def smoothed_logistic(logits: "Tensor", label_smoothing: float) -> "Tensor":
    """Compute -(1 - ε)·log σ(x) - ε·log σ(-x)."""
    losses = -(1 - label_smoothing) * log_sigmoid(logits)
    return losses - label_smoothing * log_sigmoid(-logits) if label_smoothing else losses


def sigmoid(pairs: Pairs, options: "DPOOptions") -> "Tensor":
    """-log σ(βΔ): DPO, Rafailov et al., 2023, equation 7; ε as in Mitchell, 2023 ("cDPO")."""
    return smoothed_logistic(
        options.beta * score_difference(pairs, options), options.label_smoothing
    )


def sigmoid_norm(pairs: Pairs, options: "DPOOptions") -> "Tensor":
    """DPO with scores per token, so that long answers do not weigh more."""
    return -log_sigmoid(options.beta * mean_score_difference(pairs, options))


def hinge(pairs: Pairs, options: "DPOOptions") -> "Tensor":
    """max(0, 1 - βΔ): SLiC, Zhao et al., 2023."""
    return (1 - options.beta * score_difference(pairs, options)).relu()


def ipo(pairs: Pairs, options: "DPOOptions") -> "Tensor":
    """(Δ - 1/(2β))² with scores per token: Azar et al., 2023, equation 17, where β is τ."""
    return (mean_score_difference(pairs, options) - 1 / (2 * options.beta)).square()


def exo_pair(pairs: Pairs, options: "DPOOptions") -> "Tensor":
    """KL of (σ(βΔ), σ(-βΔ)) from (1 - ε, ε): EXO, Ji et al., 2024, equation 16."""
    logits, epsilon = options.beta * score_difference(pairs, options), options.label_smoothing
    # KL(p ‖ q) = Σ p·(log p - log q), with p from the model and q = (1 - ε, ε).
    chosen = logits.sigmoid() * (log_sigmoid(logits) - math.log1p(-epsilon))
    rejected = (-logits).sigmoid() * (log_sigmoid(-logits) - math.log(epsilon))
    return chosen + rejected


def nca_pair(pairs: Pairs, options: "DPOOptions") -> "Tensor":
    """-log σ(βc) - ½·log σ(-βc) - ½·log σ(-βr): NCA, Chen et al., 2024."""
    chosen, rejected = options.beta * pairs.chosen_ratio, options.beta * pairs.rejected_ratio
    return -log_sigmoid(chosen) - 0.5 * (log_sigmoid(-chosen) + log_sigmoid(-rejected))


def robust(pairs: Pairs, options: "DPOOptions") -> "Tensor":
    """The unbiased loss if a fraction ε of the pairs is swapped: Chowdhury et al., 2024."""
    logits, epsilon = options.beta * score_difference(pairs, options), options.label_smoothing
    swapped = epsilon * log_sigmoid(-logits) - (1 - epsilon) * log_sigmoid(logits)
    # Normalized so that the expected loss on swapped labels is that on clean ones.
    return swapped / (1 - 2 * epsilon)


def bco_pair(pairs: Pairs, options: "DPOOptions") -> "Tensor":
    """-log σ(βc) - log σ(-βr): BCO on pairs, Jung et al., 2024, with a reward shift of 0."""
    return -log_sigmoid(options.beta * pairs.chosen_ratio) - log_sigmoid(
        -options.beta * pairs.rejected_ratio
    )


def sppo_hard(pairs: Pairs, options: "DPOOptions") -> "Tensor":
    """(c - 1/(2β))² + (r + 1/(2β))²: SPPO, Wu et al., 2024, with a certain preference."""
    target = 0.5 / options.beta
    return (pairs.chosen_ratio - target).square() + (pairs.rejected_ratio + target).square()


def apo_zero(pairs: Pairs, options: "DPOOptions") -> "Tensor":
    """1 - σ(βc) + σ(βr): APO for answers better than the model's, D'Oosterlinck et al., 2024."""
    return (-options.beta * pairs.chosen_ratio).sigmoid() + (
        options.beta * pairs.rejected_ratio
    ).sigmoid()


def apo_down(pairs: Pairs, options: "DPOOptions") -> "Tensor":
    """σ(βc) + 1 - σ(βΔ): APO for answers worse than the model's, equation 8."""
    difference = pairs.chosen_ratio - pairs.rejected_ratio
    return (options.beta * pairs.chosen_ratio).sigmoid() + (-options.beta * difference).sigmoid()


def discopop(pairs: Pairs, options: "DPOOptions") -> "Tensor":
    """Logistic and exponential loss, mixed by σ(βΔ/τ): Lu et al., 2024, equation 5."""
    logits = options.beta * score_difference(pairs, options)
    share = (logits / options.discopop_tau).sigmoid()
    return -log_sigmoid(logits) * (1 - share) + (-logits).exp() * share


def sft(pairs: Pairs, options: "DPOOptions") -> "Tensor":
    """Mean negative log-probability of the chosen answer's tokens; a term of weighted lists.

    Every answer has the same weight; TRL averages over all tokens of a microbatch instead.
    """
    return -pairs.chosen / pairs.chosen_tokens


def simpo(pairs: Pairs, options: "DPOOptions") -> "Tensor":
    """-log σ(β·(mean log π_c - mean log π_r) - γ): SimPO, Meng et al., 2024, equation 6."""
    difference = pairs.chosen / pairs.chosen_tokens - pairs.rejected / pairs.rejected_tokens
    return smoothed_logistic(
        options.beta * difference - options.simpo_gamma, options.label_smoothing
    )


def cpo(pairs: Pairs, options: "DPOOptions") -> "Tensor":
    """-log σ(β·(log π_c - log π_r)) + α·sft: CPO, Xu et al., 2024, equation 5."""
    logits = options.beta * (pairs.chosen - pairs.rejected)
    return smoothed_logistic(logits, options.label_smoothing) + options.cpo_alpha * sft(
        pairs, options
    )


def orpo(pairs: Pairs, options: "DPOOptions") -> "Tensor":
    """Sft - β·log σ(log odds ratio), odds of token means: ORPO, Hong et al., 2024, equation 6."""
    chosen = pairs.chosen / pairs.chosen_tokens
    rejected = pairs.rejected / pairs.rejected_tokens
    # odds(p) = p / (1 - p), where p is the geometric mean of the token probabilities.
    log_odds = (chosen - rejected) - (log1mexp(chosen) - log1mexp(rejected))
    return -chosen - options.beta * log_sigmoid(log_odds)


def log_sigmoid(x: "Tensor") -> "Tensor":
    """Compute log σ(x) = -log(1 + exp(-x)) without overflow."""
    return -(-x).logaddexp(x.new_zeros(()))


def log1mexp(x: "Tensor") -> "Tensor":
    """Compute log(1 - exp(x)) for x < 0 without cancellation (Mächler, 2012)."""
    x = x.clamp(max=-1e-7)  # a probability of 1 would give an infinite loss
    switch = -math.log(2)  # above it, expm1 is accurate; below it, log1p is
    near_zero = (-x.clamp(min=switch).expm1()).log()
    # Both branches are clamped, so that the unused one has a finite gradient.
    return near_zero.where(x > switch, (-x.clamp(max=switch).exp()).log1p())


LOSSES: Final[dict[str, PairLoss]] = {
    loss.__name__: loss
    for loss in (
        *(sigmoid, sigmoid_norm, hinge, ipo, exo_pair, nca_pair, robust, bco_pair, sppo_hard),
        *(apo_zero, apo_down, discopop, sft, simpo, cpo, orpo),
    )
}
WITHOUT_REFERENCE: Final = frozenset({"sft", "simpo", "cpo", "orpo"})
"""Losses that need no reference model."""
SMOOTHED: Final = frozenset({"sigmoid", "robust", "exo_pair", "simpo", "cpo"})
"""Losses that use label_smoothing."""
PER_TOKEN: Final = frozenset({"simpo", "orpo"})
"""Losses whose implicit reward is a mean over tokens."""
OF_DIFFERENCE: Final = frozenset(
    {"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"}
)
"""Losses that other f-divergences generalize."""
F_DIVERGENCES: Final = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")


def _check_types(instance: Any, attribute: "Attribute[Any]", value: object) -> None:
    """Require a name of `LOSSES`, or a list of different ones."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names or len(set(map(str, names))) < len(names):
        raise ConfigError(
            "loss_type must be the name of a loss or a list of different names, got "
            f"{short_repr(value)}; correct it"
        )
    for name in names:
        if name not in LOSSES:
            raise ConfigError(f"loss_type is {short_repr(name)}; {nearest(str(name), LOSSES)}")


def _check_weights(instance: Any, attribute: "Attribute[Any]", value: object) -> None:
    """Require one finite weight for each loss."""
    if value is None:
        return
    count = len(instance.loss_names)
    if not isinstance(value, list | tuple) or len(value) != count:
        raise ConfigError(
            f"loss_weights must have one number for each of the {count} losses, got "
            f"{short_repr(value)}; add or remove numbers"
        )
    for weight in value:
        number()(instance, attribute, weight)


def _check_smoothing(instance: Any, attribute: "Attribute[Any]", value: object) -> None:
    """Require ε below one half, and above 0 for EXO."""
    number(below=0.5)(instance, attribute, value)
    if value == 0 and "exo_pair" in instance.loss_names:
        raise ConfigError("label_smoothing must be above 0 for exo_pair, got 0; use 1e-3")


def _check_divergence(instance: Any, attribute: "Attribute[Any]", value: object) -> None:
    """Require a divergence that all losses of the list support."""
    one_of(*F_DIVERGENCES)(instance, attribute, value)
    others = sorted(set(instance.loss_names) - OF_DIFFERENCE)
    if value != "reverse_kl" and others:
        raise ConfigError(
            f"f_divergence_type must be 'reverse_kl' for {', '.join(others)}, got {value!r}; "
            "change it or loss_type"
        )


def _check_tail(instance: Any, attribute: "Attribute[Any]", value: object) -> None:
    """Require a weight from 0 to 1, and losses of log-ratios."""
    number(maximum=1.0, optional=True)(instance, attribute, value)
    others = sorted(set(instance.loss_names) & WITHOUT_REFERENCE)
    if value is not None and others:
        raise ConfigError(
            f"ld_alpha cannot be used with {', '.join(others)}, which has no log-ratios; remove "
            "one of them"
        )


@frozen(kw_only=True, slots=False)  # the trainer inherits from more than one
class DPOOptions:
    """Settings of DPO and its variants."""

    loss_type: str | Sequence[str] = field(default="sigmoid", validator=_check_types)
    """Loss: sigmoid (DPO), sigmoid_norm, hinge, ipo, exo_pair, nca_pair, robust, bco_pair,
    sppo_hard, apo_zero, apo_down, discopop, sft, simpo, cpo or orpo; or a list, whose sum is
    minimized."""
    loss_weights: Sequence[float] | None = field(default=None, validator=_check_weights)
    """Weight of each loss in the list. Default: 1 each."""
    beta: float = field(default=0.1, validator=number(minimum=1e-6))
    """β: strength of the constraint to stay near the reference."""
    label_smoothing: float = field(default=0.0, validator=_check_smoothing)
    """ε: assumed fraction of pairs with swapped labels; used by sigmoid, robust, exo_pair, simpo
    and cpo."""
    reference_free: bool = field(default=False, validator=flag)
    """Use a uniform reference instead of a reference model."""
    f_divergence_type: str = field(default="reverse_kl", validator=_check_divergence)
    """Divergence from the reference: reverse_kl, forward_kl, js_divergence or alpha_divergence."""
    f_alpha_divergence_coef: float = field(default=0.5, validator=number())
    """α of alpha_divergence."""
    ld_alpha: float | None = field(default=None, validator=_check_tail)
    """α of LD-DPO: weight of an answer's tokens beyond the length of the shorter answer."""
    discopop_tau: float = field(default=0.05, validator=number(minimum=1e-6))
    """τ of discopop."""
    simpo_gamma: float = field(default=0.5, validator=number())
    """γ of simpo: required margin of the implicit rewards."""
    cpo_alpha: float = field(default=1.0, validator=number())
    """Weight of the sft term of cpo."""

    used_if: ClassVar[tuple[UsedIf, ...]] = (
        UsedIf(
            "label_smoothing",
            "by the losses sigmoid, robust, exo_pair, simpo and cpo",
            lambda run: SMOOTHED.intersection(run.loss_names),
        ),
        UsedIf(
            "f_alpha_divergence_coef",
            "with f_divergence_type='alpha_divergence'",
            lambda run: run.f_divergence_type == "alpha_divergence",
        ),
        UsedIf("discopop_tau", "by the loss discopop", lambda run: "discopop" in run.loss_names),
        UsedIf("simpo_gamma", "by the loss simpo", lambda run: "simpo" in run.loss_names),
        UsedIf("cpo_alpha", "by the loss cpo", lambda run: "cpo" in run.loss_names),
        UsedIf("beta", "by losses other than sft", lambda run: set(run.loss_names) != {"sft"}),
        UsedIf(
            "reference_free",
            "by losses of log-ratios, which sft, simpo, cpo and orpo are not",
            lambda run: not WITHOUT_REFERENCE.issuperset(run.loss_names),
        ),
        UsedIf(
            "reference_model",
            "by losses of log-ratios, without reference_free",
            lambda run: run.needs_reference,
        ),
    )

    @property
    def loss_names(self) -> tuple[str, ...]:
        """The names in `loss_type`."""
        return (self.loss_type,) if isinstance(self.loss_type, str) else tuple(self.loss_type)

    @property
    def needs_reference(self) -> bool:
        """Return whether any of the losses reads log-probabilities of a reference model."""
        return not (self.reference_free or WITHOUT_REFERENCE.issuperset(self.loss_names))
