"""Losses of a student against a teacher's logits. Shapes: B rows, S positions, V vocabulary."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ms_compress.errors import ConfigError
from ms_compress.settings import nearest

__all__ = ["Divergence", "distillation_loss"]

Divergence = Literal["forward", "reverse", "skewed"]
KINDS = ("forward", "reverse", "skewed")


def distillation_loss(
    student: Tensor,
    teacher: Tensor,
    *,
    kind: Divergence = "forward",
    temperature: float = 1.0,
    skew: float = 0.1,
    targets: Tensor | None = None,
) -> Tensor:
    """Mean divergence of a student's distribution from its teacher's, in nats a token.

    With p the teacher's and q the student's probabilities at a temperature τ, times τ²:
    `forward` KL(p ‖ q) (Hinton et al. 2015, arXiv:1503.02531), `reverse` KL(q ‖ p) (MiniLLM,
    arXiv:2306.08543), `skewed` KL(p ‖ λp + (1-λ)q) (DistiLLM, arXiv:2402.03898).

    Args:
        student: (..., V) logits, with gradient.
        teacher: (..., V) logits; no gradient flows to them.
        kind: which divergence.
        temperature: above 0.
        skew: λ of `skewed`, from 0, below 1; 0 is `forward`.
        targets: (...) int64; positions of -100 do not count.

    Returns:
        A float32 scalar; 0 where no position counts.

    Raises:
        ConfigError: an argument is out of range, or the vocabularies differ.
    """
    if kind not in KINDS:
        raise ConfigError(f"kind is {kind!r}; {nearest(str(kind), KINDS)}")
    if not temperature > 0 or not 0 <= skew < 1:
        raise ConfigError(
            f"temperature is {temperature} and skew {skew}; give above 0, and from 0, below 1"
        )
    if student.shape != teacher.shape:
        raise ConfigError(
            f"student's logits are {tuple(student.shape)}, teacher's {tuple(teacher.shape)}; both"
            " need one vocabulary"
        )
    log_q = F.log_softmax(student.float() / temperature, -1)
    log_p = F.log_softmax(teacher.detach().float() / temperature, -1)
    if kind == "reverse":
        each = F.kl_div(log_p, log_q, reduction="none", log_target=True)
    else:
        if kind == "skewed" and skew > 0:
            parts = torch.stack(
                (log_p + torch.tensor(skew).log(), log_q + torch.tensor(1 - skew).log())
            )
            log_q = parts.logsumexp(0)
        each = F.kl_div(log_q, log_p, reduction="none", log_target=True)
    tokens = each.sum(-1) * temperature**2
    if targets is None:
        return tokens.mean()
    counted = targets != -100
    return (tokens * counted).sum() / counted.sum().clamp(min=1)
