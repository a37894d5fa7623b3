"""Settings of expert load balancing, shared by engine and run file; imports no torch."""

from typing import TYPE_CHECKING, Any

from attrs import Attribute, evolve, field, frozen

from ms_parallel.errors import ConfigError
from ms_parallel.settings import nearest, number, short_repr
from ms_parallel.used_settings import UsedIf, check_used

if TYPE_CHECKING:  # a run file's keys are known without torch
    from ms_parallel.models.experts.router_config import Mixture

METHODS = ("none", "sequence", "step", "bias")
CUT_DEPENDENT = ("batch", "microbatch", "micro_batch", "aux_loss", "global_batch")


def method(instance: object, attribute: "Attribute[Any]", value: object) -> None:
    """Validate the balancing method; None leaves it to the model.

    Raises:
        ConfigError: the method is unknown, or depends on how the batch is split.
    """
    if value in CUT_DEPENDENT:
        raise ConfigError(
            f"{attribute.name}={value!r} would count tokens per microbatch, so the gradient would"
            " depend on microbatch_size and the layout; use 'step' (counts of the previous step),"
            " 'sequence' (counts of the token's document) or 'bias'"
        )
    if value is not None and value not in METHODS:
        raise ConfigError(
            f"{attribute.name} is {short_repr(value)}; {nearest(str(value), METHODS)}"
        )


@frozen(kw_only=True)
class BalanceSettings:
    """Settings of expert load balancing.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
    """

    method: str | None = field(default=None, validator=method)
    """`step`: a loss with the expert loads of the previous step. `sequence`: a loss with the loads
    of each token's document. `bias`: adjust the selection bias after each step as in DeepSeek-V3,
    plus the sequence loss if `coefficient` is set. `none`: no balancing. None: `bias` if the
    routers have one, else `step` if `coefficient` or config.json's router_aux_loss_coef is set."""
    coefficient: float | None = field(default=None, validator=number(optional=True))
    """Weight of the loss E · Σ f · P, averaged over layers, which equals top-k for an even load.
    None: router_aux_loss_coef of config.json."""
    bias_rate: float = field(default=1e-3, validator=number())
    """Change of an expert's bias per step."""
    z_loss_coefficient: float = field(default=0.0, validator=number())
    """Weight of the squared logsumexp of router logits, averaged over tokens and layers."""

    def of(self, mixture: "Mixture | None") -> "BalanceSettings":
        """Return the settings with all defaults resolved for a model.

        Raises:
            ConfigError: the settings need something that the model does not have.
        """
        if mixture is None:
            if self.method not in (None, "none") or self.coefficient or self.z_loss_coefficient:
                raise ConfigError(
                    "balance, balance_coefficient and router_z_loss_coefficient need a mixture of"
                    " experts, and the model is dense; remove them"
                )
            rule = UsedIf("bias_rate", "by a mixture of experts")
            check_used(self, (rule,), error=ConfigError, prefix="balance_")
            return BalanceSettings(method="none", coefficient=0.0)
        corrected, model_coefficient = mixture.choice.corrected, mixture.coefficient
        if self.method == "bias" and not corrected:
            raise ConfigError(
                "balance='bias' needs routers with a score correction bias, which this model's"
                " routers lack; use 'step' or 'sequence'"
            )
        has_loss = model_coefficient or self.coefficient
        method = self.method or ("bias" if corrected else "step" if has_loss else "none")
        rules = (
            UsedIf(
                "coefficient",
                "with a balance other than 'none'",
                lambda _: method != "none" or not self.coefficient,
            ),
            UsedIf("bias_rate", "with balance='bias'", lambda _: method == "bias"),
        )
        check_used(self, rules, error=ConfigError, prefix="balance_")
        default = {"bias": 0.0, "none": 0.0}.get(method, model_coefficient)
        if self.coefficient is None and method in ("step", "sequence") and not model_coefficient:
            raise ConfigError(
                f"balance={method!r} needs a loss weight, and config.json has no"
                " router_aux_loss_coef; set balance_coefficient"
            )
        coefficient = default if self.coefficient is None else self.coefficient
        return evolve(self, method=method, coefficient=coefficient)


def balance_of(options: Any) -> BalanceSettings:
    """Return the balance settings among the options of an engine or a run."""
    return BalanceSettings(
        method=options.balance,
        coefficient=options.balance_coefficient,
        bias_rate=options.balance_bias_rate,
        z_loss_coefficient=options.router_z_loss_coefficient,
    )
