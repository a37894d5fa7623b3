"""Distance between the hidden states of a student and its teacher, layer by layer.

Every token then provides a signal for all features of all layers, while logits provide one for the
last layer only (TinyBERT, arXiv:1909.10351; as there, the layers of a shallower student are matched
with the teacher's layers that they were cut from). Shapes: B rows, S positions, H hidden size.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from ms_compress.methods.student import kept_layers
from ms_compress.models.selection import blocks_of

Hook = Callable[[nn.Module, object, Tensor | tuple[Tensor, ...]], None]


class HiddenStates:
    """Outputs of both models' layers in the last forward, (B, S, H) each."""

    def __init__(self) -> None:
        self.student: list[Tensor] = []
        self.teacher: list[Tensor] = []

    @classmethod
    @contextmanager
    def watched(cls, student: nn.Module, teacher: nn.Module) -> "Iterator[HiddenStates]":
        """Record the outputs of both models' layers inside the `with` block.

        Raises:
            LayerError: the architecture of one is not supported.
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
        """Return `hidden_distance` of the last forward, and clear its outputs."""
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
