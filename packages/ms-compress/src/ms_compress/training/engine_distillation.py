"""Distillation under ms-parallel's engine, with neither model's logits ever held whole.

The teacher's hidden states (B, S, H) are computed once; logits of both models exist for a chunk of
positions at a time, and the student's are computed again in the backward.
Shapes: B rows, S positions, H hidden, V vocabulary.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from attrs import field, frozen
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ms_compress.settings import number, one_of, whole
from ms_compress.training.distillation import distillation_loss
from ms_compress.training.options import Divergence

IGNORED = -100

Head = Callable[[slice], Tensor]
"""Logits (B, s, V) of a slice of positions."""


class StageOutput(Protocol):
    """What the loss asks of a student's last pipeline stage."""

    def logits(self, positions: slice) -> Tensor:
        """Return logits (B, s, V) of some positions."""
        ...


@frozen(kw_only=True, eq=False)
class DistillationLoss:
    """A loss: the mean divergence from a teacher over the targets of the global batch.

    It follows `ms_parallel.engine.loss.Loss`:
    `Engine.step(batch, DistillationLoss(teacher=...))`.
    """

    teacher: Callable[[Mapping[str, Tensor]], Head]
    """Given a batch, returns what gives the teacher's logits; see `engine_teacher`."""
    kind: Divergence = field(default="forward", validator=one_of("forward", "reverse", "skewed"))
    temperature: float = field(default=1.0, validator=number(least=1e-3))
    skew: float = field(default=0.1, validator=number(below=1.0))
    chunk: int = field(default=64, validator=whole())
    """Positions whose logits exist at once."""

    def weight(self, batch: Mapping[str, Tensor]) -> float:
        """Count the targets that are not -100."""
        return float((batch["targets"] != IGNORED).sum())

    def __call__(self, output: StageOutput, batch: Mapping[str, Tensor]) -> Tensor:
        """Add up the divergences of this microbatch's targets to a float32 scalar."""
        targets = batch["targets"]
        head = self.teacher(batch)
        total = torch.zeros((), device=targets.device)
        for first in range(0, targets.shape[1], self.chunk):
            part = slice(first, min(first + self.chunk, targets.shape[1]))
            total = total + checkpoint(self._sum, output, head, targets, part, use_reentrant=False)
        return total

    def _sum(self, output: StageOutput, head: Head, targets: Tensor, part: slice) -> Tensor:
        with torch.no_grad():
            theirs = head(part)
        mean = distillation_loss(
            output.logits(part),
            theirs,
            kind=self.kind,
            temperature=self.temperature,
            skew=self.skew,
            targets=targets[:, part],
        )
        return mean * (targets[:, part] != IGNORED).sum()


def engine_teacher(model: Any) -> Callable[[Mapping[str, Tensor]], Head]:
    """Make a whole model of ms-parallel a teacher, in evaluation mode and without gradients.

    Args:
        model: `ms_parallel.load_model(folder)`; positions and documents of a batch are heeded.
    """
    model.train(False)

    @torch.no_grad()
    def of(batch: Mapping[str, Tensor]) -> Head:
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

    return of
