"""The policy loss of PPO, GRPO and RLOO; the formulas are in `losses/surrogates.py`.

The algorithms differ as follows:
1. PPO: one ratio per token, mean over tokens.
2. GRPO (Shao et al., 2024, equation 3): the losses of `LOSS_TYPES`.
3. RLOO (Ahmadian et al., 2024): one ratio per response, mean over responses. In the first update
   the gradient equals the gradient of -A·log π.
Shapes: B rows, S positions. A mask is True where the target is a response token.
"""

from collections.abc import Callable

import torch
from attrs import field, frozen
from torch import Tensor

from ms_align.errors import ConfigError
from ms_align.losses import kl
from ms_align.losses.protocol import IGNORED, Batch, Output
from ms_align.losses.surrogates import Aggregation, Surrogate, SurrogateOptions, Terms, clipped
from ms_align.settings import integer, number, one_of


def per_token(log_ratios: Tensor, mask: Tensor) -> Tensor:
    """Keep one log-ratio per token, (B, S)."""
    return log_ratios


def per_response(log_ratios: Tensor, mask: Tensor) -> Tensor:
    """Sum the log-ratios of each response and repeat the sum at its tokens, (B, S)."""
    return log_ratios.sum(1, keepdim=True).expand_as(log_ratios)


@frozen(kw_only=True)
class PolicyLoss:
    """Clipped policy loss. Reads `targets`, `old_logprobs`, `advantages`, all (B, S).

    Also reads `reference_logprobs` if `kl_coeff` is not 0.
    """

    clip_low: float = field(default=0.2, validator=number())
    clip_high: float = field(default=0.2, validator=number())
    temperature: float = field(default=1.0, validator=number(minimum=1e-6))
    """Sampling temperature of the responses."""
    entropy_coeff: float = field(default=0.0, validator=number())
    kl_coeff: float = field(default=0.0, validator=number())
    """Coefficient of the KL term in the loss; 0 if the KL penalty is in the reward."""
    kl_estimator: str = "k3_weighted"
    aggregation: Aggregation = field(
        default="token", validator=one_of("token", "sequence", "constant", "sum")
    )
    max_response_tokens: int | None = field(default=None, validator=integer(optional=True))
    """Maximum response length in tokens, for `constant`."""
    ratio: Callable[[Tensor, Tensor], Tensor] = per_token
    """Maps the log-ratios of tokens (B, S), with their mask (B, S), to the surrogate's (B, S)."""
    function: Surrogate = clipped
    options: SurrogateOptions = field(factory=SurrogateOptions)

    @property
    def statistics(self) -> tuple[str, ...]:
        """Entropy, KL from the sampling policy, fraction of clipped tokens, and the KL term."""
        penalty = ("kl_loss",) if self.kl_coeff else ()
        return ("entropy", "kl_old", "clip_fraction", *penalty)

    def weight(self, batch: Batch) -> float:
        """Return the loss divisor for this batch; see `loss_divisor`."""
        return loss_divisor(target_mask(batch), self.aggregation, self.max_response_tokens)

    def __call__(self, output: Output, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the weighted sum over response tokens and the sums of the statistics."""
        mask = target_mask(batch)
        weights = token_weights(mask, self.aggregation)
        losses, terms = self.terms(output, batch, mask)
        sums = [(terms[name].detach() * weights).sum() for name in self.statistics]
        return (losses * weights).sum(), torch.stack(sums)

    def terms(self, output: Output, batch: Batch, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of each token and the statistics by name, all (B, S)."""
        old_logprobs, advantages = batch["old_logprobs"], batch["advantages"]
        logprobs = -output.token_losses(batch["targets"], temperature=self.temperature)
        # log π/μ; masked positions get ratio 1, so that exp cannot overflow there.
        log_ratios = torch.where(mask, logprobs - old_logprobs, 0.0)
        losses, is_clipped = self.function(
            Terms(
                log_ratios=self.ratio(log_ratios, mask),
                logprobs=torch.where(mask, logprobs, 0.0),
                advantages=advantages,
                clip_low=self.clip_low,
                clip_high=self.clip_high,
                options=self.options,
            )
        )
        policy_loss = losses
        has_bonus = self.entropy_coeff > 0
        # Without a bonus the entropy is only a statistic and needs no graph.
        with torch.set_grad_enabled(has_bonus and torch.is_grad_enabled()):
            entropy = output.entropies(mask, temperature=self.temperature)
        if has_bonus:
            losses = losses - self.entropy_coeff * entropy
        with torch.no_grad():
            # k3 estimate of the KL from the sampling policy to the current one
            kl_old = self.ratio(torch.expm1(log_ratios) - log_ratios, mask)
        terms = {
            "policy_loss": policy_loss,
            "entropy": entropy,
            "kl_old": kl_old,
            "clip_fraction": is_clipped.float(),
        }
        if self.kl_coeff:
            reference = batch["reference_logprobs"]
            terms["kl_loss"] = kl.loss_term(
                logprobs, reference, old_logprobs, mask, self.kl_estimator
            )
            losses = losses + self.kl_coeff * terms["kl_loss"]
        return losses, terms


def target_mask(batch: Batch) -> Tensor:
    """Return the mask of targets, (B, S) bool."""
    return batch["targets"] != IGNORED


def token_weights(mask: Tensor, aggregation: str) -> Tensor:
    """Return the weight of each token in the loss, (B, S) float32.

    `sequence`: 1 per response, split among its tokens. Otherwise 1 per token.
    """
    weights = mask.float()
    if aggregation == "sequence":
        return weights / weights.sum(1, keepdim=True).clamp(min=1)
    return weights


def loss_divisor(mask: Tensor, aggregation: str, max_response_tokens: int | None) -> float:
    """Return the divisor of the weighted sum of token losses.

    Args:
        mask: (B, S).
        aggregation: an `Aggregation`.
        max_response_tokens: maximum response length in tokens, for `constant`.

    Raises:
        ConfigError: the aggregation is unknown.
    """
    if aggregation == "token":
        return float(mask.sum())
    if aggregation in ("sequence", "sum"):
        return float(mask.any(1).sum())
    if aggregation == "constant" and max_response_tokens:
        return float(mask.any(1).sum() * max_response_tokens)
    raise ConfigError(
        "aggregation must be 'token', 'sequence', 'constant' or 'sum', got "
        f"{aggregation!r}; use one"
    )
