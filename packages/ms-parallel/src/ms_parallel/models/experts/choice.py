"""Settings of an expert router."""

from typing import Literal

from attrs import field, frozen

from ms_parallel.errors import ConfigError
from ms_parallel.settings.validators import flag, number, one_of, whole

Scores = Literal["softmax", "sigmoid", "softmax_of_chosen"]

MOST_EXPERTS = 1 << 13
"""Ten times more than any known model; a larger number means a damaged or hostile file."""


@frozen(kw_only=True)
class Choice:
    """Top-k selection of experts for a token.

    Raises:
        ConfigError: top-k exceeds the number of experts, or groups do not divide it.
    """

    num_experts: int = field(validator=whole(most=MOST_EXPERTS))
    """Number of experts per layer."""
    num_experts_per_tok: int = field(validator=whole(most=MOST_EXPERTS))
    """Number of experts per token (top-k)."""
    scores: Scores = field(
        default="softmax", validator=one_of("softmax", "sigmoid", "softmax_of_chosen")
    )
    """Scores from the router's logits: softmax over all experts, sigmoid of each, or softmax over
    the top-k."""
    normalized: bool = field(default=True, validator=flag)
    """Normalize the top-k weights to sum to 1."""
    factor: float = field(default=1.0, validator=number(least=1e-30))
    """Scale of the final weights."""
    groups: int = field(default=1, validator=whole(most=MOST_EXPERTS))
    """Number of equal expert groups for group-limited routing."""
    chosen_groups: int = field(default=1, validator=whole(most=MOST_EXPERTS))
    """Number of groups that a token may use, ranked by the sum of their two best scores."""
    corrected: bool = field(default=False, validator=flag)
    """Add a bias per expert to the scores for selection only, not to the weights."""
    bias: bool = field(default=False, validator=flag)
    """The router's linear layer has a bias."""

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
    """Mixture-of-experts settings of a model."""

    layers: tuple[int, ...]
    """Indices of the layers with experts."""
    choice: Choice
    """Router settings of these layers."""
    coefficient: float = 0.0
    """Load-balancing loss coefficient unless the run sets one: router_aux_loss_coef."""
