"""Distillation loss of a student given its teacher's logits.

Shapes: B rows, S positions, V vocabulary.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ms_compress.arguments import check_number, check_type, shown
from ms_compress.errors import ConfigError
from ms_compress.settings import nearest
from ms_compress.training.options import Divergence

DIVERGENCES = ("forward", "reverse", "skewed")
ZERO_LOGIT = -1e30
"""A logit with probability 0 in float32 and a finite logarithm."""


def distillation_loss(
    student: Tensor,
    teacher: Tensor,
    *,
    kind: Divergence = "forward",
    temperature: float = 1.0,
    skew: float = 0.1,
    targets: Tensor | None = None,
) -> Tensor:
    """Return the mean divergence of a student's distribution from its teacher's, in nats per token.

    With p the teacher's and q the student's probabilities at temperature τ, multiplied by τ²:
    `forward` KL(p ‖ q) (Hinton et al. 2015, arXiv:1503.02531), `reverse` KL(q ‖ p) (MiniLLM,
    arXiv:2306.08543), `skewed` KL(p ‖ λp + (1-λ)q) (DistiLLM, arXiv:2402.03898).

    Args:
        student: (..., V) logits, with gradient.
        teacher: (..., V) logits; no gradient flows to them.
        kind: type of divergence.
        temperature: above 0.
        skew: λ of `skewed`, from 0 to below 1; 0 is `forward`.
        targets: (...) int64; positions with -100 are ignored, whatever their logits are.

    Returns:
        A float32 scalar; 0 if every position is ignored. An entry with logit -inf adds 0 if the
        distribution that is averaged over gives it no probability, and infinity if only the other
        distribution does.

    Raises:
        ConfigError: an argument is out of range, or the vocabularies differ.
    """
    if not isinstance(kind, str) or kind not in DIVERGENCES:
        raise ConfigError(f"kind is {shown(kind)}; {nearest(str(kind), DIVERGENCES)}")
    for name, tensor in (("student", student), ("teacher", teacher), ("targets", targets)):
        optional = name == "targets"
        check_type(name, tensor, Tensor, "a tensor", error=ConfigError, optional=optional)
    check_number("temperature", temperature, minimum=0, error=ConfigError)
    check_number("skew", skew, minimum=0, error=ConfigError)
    if not temperature > 0 or not 0 <= skew < 1:
        raise ConfigError(
            "temperature must be above 0 and skew from 0 to below 1, got"
            f" {temperature} and {skew}; use 1.0 and 0.1"
        )
    if student.shape != teacher.shape:
        raise ConfigError(
            f"student and teacher logits must have one shape, got {tuple(student.shape)} and"
            f" {tuple(teacher.shape)}; use models with the same vocabulary"
        )
    counted = None if targets is None else targets != -100
    per_token = None
    # Infinite logits are rare, so they are only handled after a check, which would break a
    # compiled graph.
    if not torch.compiler.is_compiling():
        per_token = _divergences(student, teacher, kind, temperature, skew)
    if per_token is None or not bool(per_token.isfinite().all()):
        finite_logits = _without_nan(student.float(), teacher.detach().float(), kind, counted)
        per_token = _divergences(*finite_logits, kind, temperature, skew)
    if counted is None:
        return per_token.mean()
    return (per_token * counted).sum() / counted.sum().clamp(min=1)


def _divergences(
    student: Tensor, teacher: Tensor, kind: Divergence, temperature: float, skew: float
) -> Tensor:
    """Return the divergence of each position, (...) float32."""
    log_q = F.log_softmax(student.float() / temperature, -1)  # (..., V), q: student
    log_p = F.log_softmax(teacher.detach().float() / temperature, -1)  # (..., V), p: teacher
    if kind == "reverse":
        terms = F.kl_div(log_p, log_q, reduction="none", log_target=True)
    else:
        if kind == "skewed" and skew > 0:
            parts = torch.stack(  # log of the mixture λp + (1-λ)q
                (log_p + torch.tensor(skew).log(), log_q + torch.tensor(1 - skew).log())
            )
            log_q = parts.logsumexp(0)
        terms = F.kl_div(log_q, log_p, reduction="none", log_target=True)
    # T² keeps gradients comparable across temperatures (Hinton et al., section 2.1).
    return terms.sum(-1) * temperature**2


def _without_nan(
    student: Tensor, teacher: Tensor, kind: Divergence, counted: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return logits whose divergence is finite wherever it is defined.

    Ignored positions become equal in both. Where the averaging distribution has probability 0,
    0 · (-inf) must be 0, also in the gradient.
    """
    if counted is not None:
        ignored = ~counted.unsqueeze(-1)
        student, teacher = student.masked_fill(ignored, 0.0), teacher.masked_fill(ignored, 0.0)
    averaged, reference = (student, teacher) if kind == "reverse" else (teacher, student)
    averaged = averaged.clamp(min=ZERO_LOGIT)
    reference = reference.masked_fill(
        (averaged == ZERO_LOGIT) & (reference < ZERO_LOGIT), ZERO_LOGIT
    )
    return (averaged, reference) if kind == "reverse" else (reference, averaged)
