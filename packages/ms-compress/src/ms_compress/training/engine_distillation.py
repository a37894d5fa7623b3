"""Distillation with ms-parallel's engine, without ever materializing either model's full logits.

The teacher's hidden states (B, S, H) are computed once. Logits of both models exist only for a
chunk of positions at a time, and the student's are recomputed in the backward.
Shapes: B rows, S positions, H hidden size, V vocabulary.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from attrs import field, frozen
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ms_compress.settings import integer, number, one_of
from ms_compress.training.distillation import distillation_loss
from ms_compress.training.options import Divergence

IGNORED = -100

Head = Callable[[slice], Tensor]
"""Returns logits (B, s, V) for a slice of positions."""


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
            # Checkpointed, so that the backward has the logits of one chunk at a time as well.
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
