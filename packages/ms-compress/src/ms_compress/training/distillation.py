"""The distillation loss of a student against its teacher's logits.

Shapes: B rows, S positions, V vocabulary.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ms_compress.errors import ConfigError
from ms_compress.settings import nearest
from ms_compress.training.options import Divergence

KINDS = ("forward", "reverse", "skewed")
NONE = -1e30
"""A logit of probability 0 in float32, whose logarithm is finite."""


def distillation_loss(
    student: Tensor,
    teacher: Tensor,
    *,
    kind: Divergence = "forward",
    temperature: float = 1.0,
    skew: float = 0.1,
    targets: Tensor | None = None,
) -> Tensor:
    """Return the mean divergence of a student's distribution from its teacher's, in nats a token.

    With p the teacher's and q the student's probabilities at a temperature τ, times τ²:
    `forward` KL(p ‖ q) (Hinton et al. 2015, arXiv:1503.02531), `reverse` KL(q ‖ p) (MiniLLM,
    arXiv:2306.08543), `skewed` KL(p ‖ λp + (1-λ)q) (DistiLLM, arXiv:2402.03898).

    Args:
        student: (..., V) logits, with gradient.
        teacher: (..., V) logits; no gradient flows to them.
        kind: which divergence.
        temperature: above 0.
        skew: λ of `skewed`, from 0, below 1; 0 is `forward`.
        targets: (...) int64; positions of -100 do not count, whatever their logits are.

    Returns:
        A float32 scalar; 0 where no position counts. An entry whose logit is -inf adds 0 if the
        distribution that is averaged over gives it no probability, and infinity if only the other
        one gives it none.

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
    counted = None if targets is None else targets != -100
    tokens = None
    # Looked for first, as it is rare; in a compiled graph that would break the graph.
    if not torch.compiler.is_compiling():
        tokens = _divergences(student, teacher, kind, temperature, skew)
    if tokens is None or not bool(tokens.isfinite().all()):
        pair = _without_nan(student.float(), teacher.detach().float(), kind, counted)
        tokens = _divergences(*pair, kind, temperature, skew)
    if counted is None:
        return tokens.mean()
    return (tokens * counted).sum() / counted.sum().clamp(min=1)


def _divergences(
    student: Tensor, teacher: Tensor, kind: Divergence, temperature: float, skew: float
) -> Tensor:
    """Return the divergence of each position, (...) float32."""
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
    return each.sum(-1) * temperature**2


def _without_nan(
    student: Tensor, teacher: Tensor, kind: Divergence, counted: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return logits whose divergence is finite where the definition is.

    Positions that do not count are alike in both. Where the distribution that is averaged over has
    none of an entry, 0 · (-inf) is to be 0, in the gradient too.
    """
    if counted is not None:
        ignored = ~counted.unsqueeze(-1)
        student, teacher = student.masked_fill(ignored, 0.0), teacher.masked_fill(ignored, 0.0)
    averaged, other = (student, teacher) if kind == "reverse" else (teacher, student)
    averaged = averaged.clamp(min=NONE)
    other = other.masked_fill((averaged == NONE) & (other < NONE), NONE)
    return (averaged, other) if kind == "reverse" else (other, averaged)
