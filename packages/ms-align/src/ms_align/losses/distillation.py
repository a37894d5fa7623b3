"""Divergence of a student's distribution from its teacher's, with settings of distillation.

This module does not import torch, so that a mistake in a run file is reported at once.
"""

from collections.abc import Mapping

from attrs import field, frozen

from ms_align.settings import flag, integer, number, numbers


@frozen(kw_only=True, slots=False)  # the trainer inherits from more than one
class GKDOptions:
    """Settings of distillation."""

    lmbda: float = field(default=0.5, validator=number(maximum=1.0))
    """λ: fraction of updates on the student's own responses; the others use the dataset's."""
    beta: float = field(default=0.5, validator=number(maximum=1.0))
    """β of the generalized Jensen-Shannon divergence: 0 for the forward KL(teacher ‖ student), 1
    for the reverse KL(student ‖ teacher), 0.5 for Jensen-Shannon."""
    temperature: float = field(default=1.0, validator=number(minimum=1e-6))
    """Temperature of sampling, and of both distributions in the loss."""
    max_new_tokens: int = field(default=128, validator=integer())
    """Maximum number of tokens in a generated response."""
    seq_kd: bool = field(default=False, validator=flag)
    """Replace the dataset's responses by the teacher's (sequence-level distillation)."""
    teacher_weights: Mapping[str, float] | None = field(
        default=None, validator=numbers(optional=True)
    )
    """With a table of teachers: weight of each teacher's divergence, all at every response.
    Default: each teacher teaches the responses of the dataset with its name."""
