"""Settings of the training after compression; reading them needs no torch."""

import math
from typing import Literal

from attrs import field, frozen

from ms_compress.settings import number, one_of, whole

Divergence = Literal["forward", "reverse", "skewed"]


@frozen(kw_only=True)
class Tuning:
    """Settings of the training after compression."""

    steps: int = field(default=100, validator=whole())
    """Steps of training."""
    batch_size: int = field(default=8, validator=whole())
    """Rows of a step."""
    sequence_length: int = field(default=256, validator=whole(least=2))
    """Tokens of a row."""
    learning_rate: float = field(default=1e-4, validator=number())
    """The highest rate; a straight warm-up over a tenth of the steps, then a cosine to zero."""
    scale_rate: float = field(default=1.0, validator=number())
    """Learned scales take so many times the learning rate; it is their logarithm that is learned.
    Over some tens of steps they gain nothing from more: Adam's first steps are whole ones."""
    weight_decay: float = field(default=0.0, validator=number())
    """AdamW's; learned scales have none."""
    max_grad_norm: float = field(default=1.0, validator=number(least=1e-12))
    """Gradients are cut to this norm."""
    seed: int = field(default=0, validator=whole(least=0, most=2**63 - 1))
    """Seed of the order of rows."""
    divergence: Divergence = field(
        default="forward", validator=one_of("forward", "reverse", "skewed")
    )
    """Divergence from the teacher, where there is one."""
    distil_weight: float = field(default=1.0, validator=number(most=1.0))
    """Share of the divergence in the loss; the rest is that of the text."""
    hidden_weight: float = field(default=0.0, validator=number())
    """Beside a teacher, so many times `hidden_distance` is added to the loss: the layers' outputs
    are to be the teacher's too. For a model in few bits, 20 was better than none."""

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, from 0."""
        warmup = max(1, self.steps // 10)
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        passed = (step - warmup) / max(1, self.steps - warmup)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * passed))
