"""How a router chooses experts, as a value."""

from typing import Literal

from attrs import field, frozen

from ms_parallel.errors import ConfigError
from ms_parallel.settings.validators import flag, number, one_of, whole

Scores = Literal["softmax", "sigmoid", "softmax_of_chosen"]

MOST_EXPERTS = 1 << 13
"""Some ten times what any model has: beyond it a file is damaged, or made to take our memory."""


@frozen(kw_only=True)
class Choice:
    """How a router chooses experts for a token.

    Raises:
        ConfigError: more are to be chosen than there are, or groups do not divide them.
    """

    num_experts: int = field(validator=whole(most=MOST_EXPERTS))
    """Experts of a layer."""
    num_experts_per_tok: int = field(validator=whole(most=MOST_EXPERTS))
    """How many each token chooses."""
    scores: Scores = field(
        default="softmax", validator=one_of("softmax", "sigmoid", "softmax_of_chosen")
    )
    """How scores follow from the router's logits: over all experts, each alone, or over the
    chosen."""
    normalized: bool = field(default=True, validator=flag)
    """The weights of the chosen are divided by their sum."""
    factor: float = field(default=1.0, validator=number(least=1e-30))
    """What the weights are multiplied by in the end."""
    groups: int = field(default=1, validator=whole(most=MOST_EXPERTS))
    """Equal groups of experts, of which the best are chosen first."""
    chosen_groups: int = field(default=1, validator=whole(most=MOST_EXPERTS))
    """How many groups are left to choose from; a group counts its two best experts."""
    corrected: bool = field(default=False, validator=flag)
    """A bias of each expert is added to the scores that choose, not to the weights."""
    bias: bool = field(default=False, validator=flag)
    """The router's linear map has a bias."""

    def __attrs_post_init__(self) -> None:
        if self.num_experts_per_tok > self.num_experts:
            raise ConfigError(
                f"num_experts_per_tok={self.num_experts_per_tok} is more than the"
                f" {self.num_experts} experts; give at most {self.num_experts}"
            )
        if self.num_experts % self.groups or self.chosen_groups > self.groups:
            raise ConfigError(
                f"{self.num_experts} experts in {self.groups} groups, {self.chosen_groups} of them"
                " chosen, do not fit; give a divisor of the experts, and at most as many chosen"
            )
        left = self.num_experts // self.groups * self.chosen_groups
        if self.num_experts_per_tok > left:
            raise ConfigError(
                f"num_experts_per_tok={self.num_experts_per_tok} is more than the {left} experts of"
                f" {self.chosen_groups} of {self.groups} groups; choose more groups"
            )


@frozen(kw_only=True)
class Mixture:
    """What the mixture of experts of a whole model is."""

    layers: tuple[int, ...]
    """Global numbers of those that have experts."""
    choice: Choice
    """How the router of each of these layers chooses."""
    coefficient: float = 0.0
    """Weight of the balance loss unless the run sets one: config.json's router_aux_loss_coef."""
