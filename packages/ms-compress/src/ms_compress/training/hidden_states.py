"""Hidden states of a student and its teacher, layer beside layer.

Each token then says something of every feature of every layer, where logits say it of the last
layer alone (TinyBERT, arXiv:1909.10351; as in it, a student of fewer layers has each matched with
the teacher's layer that it was cut from). Shapes: B rows, S positions, H hidden.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from ms_compress.methods.student import kept_layers
from ms_compress.models.selection import blocks_of

Hook = Callable[[nn.Module, object, Tensor | tuple[Tensor, ...]], None]


class HiddenStates:
    """The outputs of both models' layers in the last forward, (B, S, H) each."""

    def __init__(self) -> None:
        self.student: list[Tensor] = []
        self.teacher: list[Tensor] = []

    @classmethod
    @contextmanager
    def watched(cls, student: nn.Module, teacher: nn.Module) -> "Iterator[HiddenStates]":
        """Record the outputs of both models' layers until the block is left.

        Raises:
            LayerError: one of them is no decoder that we know.
            ConfigError: the student has more layers than the teacher.
        """
        states = cls()
        mine, all_of_teacher = (
            [block for _, block in blocks_of(model)] for model in (student, teacher)
        )
        theirs = [all_of_teacher[at] for at in kept_layers(len(all_of_teacher), len(mine))]
        with ExitStack() as hooks:
            for blocks, held in ((mine, states.student), (theirs, states.teacher)):
                for block in blocks:
                    hooks.enter_context(block.register_forward_hook(_keep_in(held)))
            yield states

    def distance(self) -> Tensor:
        """Return `hidden_distance` of the last forward, and forget its outputs."""
        found = hidden_distance(self.student, self.teacher)
        self.student.clear()
        self.teacher.clear()
        return found


def hidden_distance(student: list[Tensor], teacher: list[Tensor]) -> Tensor:
    """Return the mean over layers of the mean squared difference, over the teacher's variance.

    Args:
        student: (B, S, H) of each layer, with gradient.
        teacher: likewise, of the same layers; no gradient flows to them.

    Returns:
        A float32 scalar; 1 where a student knows no more than each layer's mean.
    """
    apart = [
        (mine.float() - theirs.detach().float()).square().mean() / theirs.detach().float().var()
        for mine, theirs in zip(student, teacher, strict=True)
    ]
    return torch.stack(apart).mean()


def _keep_in(held: list[Tensor]) -> Hook:
    def hook(block: nn.Module, inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        held.append(output if isinstance(output, Tensor) else output[0])

    return hook
