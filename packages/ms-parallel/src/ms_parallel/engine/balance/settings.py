"""Settings of expert load balancing, shared by engine and run file; imports no torch."""

from typing import TYPE_CHECKING, Any

from attrs import Attribute, evolve, field, frozen

from ms_parallel.errors import ConfigError
from ms_parallel.settings import nearest, number, short_repr

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
            f"{attribute.name}={value!r} counts the tokens of what passes at once, so that the"
            " gradient would depend on microbatch_size and the layout; choose 'step' (the whole"
            " update before), 'sequence' (a token's own document) or 'bias'"
        )
    if value is not None and value not in METHODS:
        raise ConfigError(
            f"{attribute.name} is {short_repr(value)}; {nearest(str(value), METHODS)}"
        )


@frozen(kw_only=True)
class Balance:
    """How the load of experts is balanced.

    Raises:
        ConfigError: a value is of the wrong kind or out of range.
    """

    method: str | None = field(default=None, validator=method)
    """`step`: a loss by the loads of the whole update before. `sequence`: a loss by those of each
    token's document. `bias`: scores are corrected after each update, as DeepSeek-V3 does, with the
    sequence's loss besides where `coefficient` is given. `none`. None: `bias` where the model has
    one to correct, else `step` where its config.json has a router_aux_loss_coef."""
    coefficient: float | None = field(default=None, validator=number(optional=True))
    """Weight of the loss E · Σ f · P, the mean over layers, which is the choices of a token where
    load is even; None for the router_aux_loss_coef of config.json, which means the same."""
    bias_rate: float = field(default=1e-3, validator=number())
    """How far an expert's bias moves in one update."""
    z_loss_coefficient: float = field(default=0.0, validator=number())
    """Weight of the mean over tokens and layers of the square of the logits' logsumexp."""

    def of(self, mixture: "Mixture | None") -> "Balance":
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
            return Balance(method="none", coefficient=0.0)
        corrected, model_coefficient = mixture.choice.corrected, mixture.coefficient
        if self.method == "bias" and not corrected:
            raise ConfigError(
                "balance='bias' needs routers with a score correction bias, which this model's"
                " routers lack; use 'step' or 'sequence'"
            )
        chosen = self.method or ("bias" if corrected else "step" if model_coefficient else "none")
        default = {"bias": 0.0, "none": 0.0}.get(chosen, model_coefficient)
        if self.coefficient is None and chosen in ("step", "sequence") and not model_coefficient:
            raise ConfigError(
                f"balance={chosen!r} adds a loss whose weight config.json does not give; set"
                " balance_coefficient"
            )
        coefficient = default if self.coefficient is None else self.coefficient
        return evolve(self, method=chosen, coefficient=coefficient)


def balance_of(options: Any) -> Balance:
    """Return the balance settings among the options of an engine or a run."""
    return Balance(
        method=options.balance,
        coefficient=options.balance_coefficient,
        bias_rate=options.balance_bias_rate,
        z_loss_coefficient=options.router_z_loss_coefficient,
    )
