"""Training settings after compression; importing them does not import torch."""

import math
from typing import Literal

from attrs import field, frozen

from ms_compress.settings import integer, number, one_of

Divergence = Literal["forward", "reverse", "skewed"]


@frozen(kw_only=True)
class Tuning:
    """Settings of the training after compression."""

    steps: int = field(default=100, validator=integer())
    """Number of training steps."""
    batch_size: int = field(default=8, validator=integer())
    """Rows per step."""
    sequence_length: int = field(default=256, validator=integer(minimum=2))
    """Tokens per row."""
    learning_rate: float = field(default=1e-4, validator=number())
    """Peak learning rate: linear warmup over 10% of the steps, then cosine decay to zero."""
    scale_rate: float = field(default=1.0, validator=number())
    """Multiplier on the learning rate for learned scales, whose logarithm is trained. Values above
    1 do not help within tens of steps, as Adam's first steps already have full size."""
    weight_decay: float = field(default=0.0, validator=number())
    """AdamW weight decay; not applied to learned scales."""
    max_grad_norm: float = field(default=1.0, validator=number(minimum=1e-12))
    """Gradient clipping norm."""
    seed: int = field(default=0, validator=integer(minimum=0, maximum=2**63 - 1))
    """Seed of the row order."""
    divergence: Divergence = field(
        default="forward", validator=one_of("forward", "reverse", "skewed")
    )
    """Divergence from the teacher; requires a teacher."""
    distill_weight: float = field(default=1.0, validator=number(maximum=1.0))
    """Weight of the divergence in the loss; the text's loss has the rest."""
    hidden_weight: float = field(default=0.0, validator=number())
    """With a teacher, weight of `hidden_distance`, which pulls the layers' outputs toward the
    teacher's. For a model with few bits, 20 was better than 0."""

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        warmup = max(1, self.steps // 10)
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        progress = (step - warmup) / max(1, self.steps - warmup)  # 0 to 1 after the warmup
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
