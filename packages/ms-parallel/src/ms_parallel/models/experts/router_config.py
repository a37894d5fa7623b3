"""Settings of an expert router."""

from typing import Literal

from attrs import field, frozen

from ms_parallel.errors import ConfigError
from ms_parallel.settings.validators import flag, integer, number, one_of

Scores = Literal["softmax", "sigmoid", "softmax_of_topk"]

MAX_EXPERTS = 1 << 13
"""Ten times more than any known model; a larger number means a damaged or hostile file."""


@frozen(kw_only=True)
class RouterConfig:
    """Top-k selection of experts for a token.

    Raises:
        ConfigError: top-k exceeds the number of experts, or groups do not divide it.
    """

    num_experts: int = field(validator=integer(maximum=MAX_EXPERTS))
    """Number of experts per layer."""
    num_experts_per_tok: int = field(validator=integer(maximum=MAX_EXPERTS))
    """Number of experts per token (top-k)."""
    scores: Scores = field(
        default="softmax", validator=one_of("softmax", "sigmoid", "softmax_of_topk")
    )
    """Scores from the router's logits: softmax over all experts, sigmoid of each, or softmax over
    the top-k."""
    normalized: bool = field(default=True, validator=flag)
    """Normalize the top-k weights to sum to 1."""
    factor: float = field(default=1.0, validator=number(minimum=1e-30))
    """Scale of the final weights."""
    groups: int = field(default=1, validator=integer(maximum=MAX_EXPERTS))
    """Number of equal expert groups for group-limited routing."""
    topk_groups: int = field(default=1, validator=integer(maximum=MAX_EXPERTS))
    """Number of groups that a token may use, ranked by the sum of their two best scores."""
    corrected: bool = field(default=False, validator=flag)
    """Add a bias per expert to the scores for selection only, not to the weights."""
    bias: bool = field(default=False, validator=flag)
    """The router's linear layer has a bias."""

    def __attrs_post_init__(self) -> None:
        if self.num_experts_per_tok > self.num_experts:
            raise ConfigError(
                f"num_experts_per_tok must be at most {self.num_experts} (the number of experts),"
                f" got {self.num_experts_per_tok}"
            )
        if self.num_experts % self.groups or self.topk_groups > self.groups:
            raise ConfigError(
                f"n_group must divide the {self.num_experts} experts, and topk_group must not"
                f" exceed n_group; got n_group={self.groups}, topk_group={self.topk_groups}"
            )
        candidates = self.num_experts // self.groups * self.topk_groups
        if self.num_experts_per_tok > candidates:
            raise ConfigError(
                f"num_experts_per_tok must be at most {candidates} (the experts in"
                f" {self.topk_groups} of {self.groups} groups), got {self.num_experts_per_tok};"
                " raise topk_group"
            )


@frozen(kw_only=True)
class Mixture:
    """Mixture-of-experts settings of a model."""

    layers: tuple[int, ...]
    """Indices of the MoE layers."""
    choice: RouterConfig
    """Router settings of these layers."""
    coefficient: float = 0.0
    """Default load-balancing loss coefficient: `router_aux_loss_coef` in config.json."""
