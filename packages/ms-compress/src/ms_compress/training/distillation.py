"""Distillation of a student from a teacher: by logits, and by the hidden states of all layers.

Hidden states give every token a signal for all features of all layers, while logits give one for
the last layer only (TinyBERT, arXiv:1909.10351; as there, the layers of a shallower student are
matched with the teacher's layers that they were cut from).

With ms-parallel's engine, neither model's full logits ever exist: the teacher's hidden states are
computed once, the logits of both models exist for a chunk of positions at a time, and the student's
are recomputed in the backward pass.
Shapes: B rows, S positions, H hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from attrs import field, frozen
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ms_compress.arguments import check_number, check_type, shown
from ms_compress.errors import ConfigError
from ms_compress.methods.student import kept_layers
from ms_compress.models.logits import IGNORED
from ms_compress.models.selection import blocks_of
from ms_compress.settings import integer, nearest, number, one_of
from ms_compress.training.options import Divergence

DIVERGENCES = ("forward", "reverse", "skewed")
ZERO_LOGIT = -1e30
"""A logit with probability 0 in float32 and a finite logarithm."""
Hook = Callable[[nn.Module, object, Tensor | tuple[Tensor, ...]], None]
Head = Callable[[slice], Tensor]
"""Returns logits (B, s, V) for a slice of positions."""


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
    counted = None if targets is None else targets != IGNORED
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


class HiddenStates:
    """Outputs of both models' layers in the last forward pass, (B, S, H) each."""

    def __init__(self) -> None:
        self.student: list[Tensor] = []
        self.teacher: list[Tensor] = []

    @classmethod
    @contextmanager
    def watched(cls, student: nn.Module, teacher: nn.Module) -> "Iterator[HiddenStates]":
        """Record the outputs of both models' layers inside the `with` block.

        Raises:
            LayerError: an architecture is not supported.
            ConfigError: the student has more layers than the teacher.
        """
        states = cls()
        student_blocks, all_teacher_blocks = (
            [block for _, block in blocks_of(model)] for model in (student, teacher)
        )
        teacher_blocks = [
            all_teacher_blocks[index]
            for index in kept_layers(len(all_teacher_blocks), len(student_blocks))
        ]
        with ExitStack() as hooks:
            for blocks, outputs in (
                (student_blocks, states.student),
                (teacher_blocks, states.teacher),
            ):
                for block in blocks:
                    hooks.enter_context(block.register_forward_hook(_append_to(outputs)))
            yield states

    def distance(self) -> Tensor:
        """Return `hidden_distance` of the last forward pass, and clear its outputs."""
        distance = hidden_distance(self.student, self.teacher)
        self.student.clear()
        self.teacher.clear()
        return distance


def hidden_distance(student: list[Tensor], teacher: list[Tensor]) -> Tensor:
    """Return the mean squared difference divided by the teacher's variance, averaged over layers.

    Args:
        student: (B, S, H) of each layer, with gradient.
        teacher: (B, S, H) of the matching layers; no gradient flows to them.

    Returns:
        A float32 scalar; 1 for a student that only outputs each layer's mean.
    """
    # Relative to the variance, so that layers with large and small values count equally.
    distances = [
        (student_states.float() - teacher_states.detach().float()).square().mean()
        / teacher_states.detach().float().var()
        for student_states, teacher_states in zip(student, teacher, strict=True)
    ]
    return torch.stack(distances).mean()


def _append_to(outputs: list[Tensor]) -> Hook:
    def hook(block: nn.Module, inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        outputs.append(output if isinstance(output, Tensor) else output[0])

    return hook


class StageOutput(Protocol):
    """Interface of the student's last pipeline stage that the loss needs."""

    def logits(self, positions: slice) -> Tensor:
        """Return logits (B, s, V) for a slice of positions."""
        ...


@frozen(kw_only=True, eq=False)
class DistillationLoss:
    """Mean divergence from a teacher over the targets of the global batch.

    Implements `ms_parallel.engine.loss.Loss`:
    `Engine.step(batch, DistillationLoss(teacher=...))`.
    """

    teacher: Callable[[Mapping[str, Tensor]], Head]
    """Maps a batch to a function that returns the teacher's logits; see `engine_teacher`."""
    kind: Divergence = field(default="forward", validator=one_of("forward", "reverse", "skewed"))
    temperature: float = field(default=1.0, validator=number(minimum=1e-3))
    skew: float = field(default=0.1, validator=number(below=1.0))
    chunk: int = field(default=64, validator=integer())
    """Number of positions whose logits exist at the same time."""

    def weight(self, batch: Mapping[str, Tensor]) -> float:
        """Return the number of targets that are not -100."""
        return float((batch["targets"] != IGNORED).sum())

    def __call__(self, output: StageOutput, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the sum of the divergences of this microbatch's targets, a float32 scalar."""
        targets = batch["targets"]
        head = self.teacher(batch)
        total = torch.zeros((), device=targets.device)
        for first in range(0, targets.shape[1], self.chunk):
            part = slice(first, min(first + self.chunk, targets.shape[1]))
            # Checkpointed, so that the backward pass holds the logits of one chunk at a time too.
            total = total + checkpoint(self._sum, output, head, targets, part, use_reentrant=False)
        return total

    def _sum(self, output: StageOutput, head: Head, targets: Tensor, part: slice) -> Tensor:
        with torch.no_grad():
            teacher_logits = head(part)
        mean = distillation_loss(
            output.logits(part),
            teacher_logits,
            kind=self.kind,
            temperature=self.temperature,
            skew=self.skew,
            targets=targets[:, part],
        )
        # Back to a sum, which the engine divides by the targets of the global batch.
        return mean * (targets[:, part] != IGNORED).sum()


def engine_teacher(model: Any) -> Callable[[Mapping[str, Tensor]], Head]:
    """Turn a complete ms-parallel model into a teacher, in evaluation mode and without gradients.

    Args:
        model: `ms_parallel.load_model(folder)`; the batch's positions and documents are used.
    """
    model.train(False)

    @torch.no_grad()
    def teacher(batch: Mapping[str, Tensor]) -> Head:
        hidden = model(
            batch["tokens"],
            positions=batch.get("positions"),
            documents=batch.get("documents"),
            logits=False,
        )

        def head(part: slice) -> Tensor:
            logits: Tensor = model.head(hidden[:, part])
            return logits

        return head

    return teacher
