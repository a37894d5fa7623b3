"""The norm of all gradients, added up in one order however weights are cut and shared out."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ms_parallel.engine.reproducible.tree import fold
from ms_parallel.split.part import local_part, part_of


class FixedNorm:
    """Squares, first within each row of a matrix, which no cut divides, then over all rows.

    Args:
        parameters: what this process trains, by name.
        counted: names of those whose gradients count here.
    """

    def __init__(self, parameters: Mapping[str, Tensor], counted: Sequence[str]) -> None:
        self.counted = counted
        mine = {name: len(parameters[name]) if parameters[name].dim() else 1 for name in counted}
        every = [mine] * dist.get_world_size()
        dist.all_gather_object(every, mine)
        lengths = {name: count for found in every for name, count in found.items()}
        self.starts: dict[str, int] = {}
        self.length = 0
        """Rows of all weights of the whole model."""
        for name in sorted(lengths):
            self.starts[name], self.length = self.length, self.length + lengths[name]
        with torch.no_grad():
            for name in counted:
                offsets = part_of(parameters[name]).offsets
                self.starts[name] += offsets[0] if offsets else 0
        kept = [local_part(parameters[name]).dtype for name in counted]
        self.dtype = torch.float64 if torch.float64 in kept else torch.float32

    def squares(self, gradients: Mapping[str, Tensor], device: torch.device) -> Tensor:
        """Sum of squares of each row (length,), 0 where it does not count here."""
        found = torch.zeros(self.length, dtype=self.dtype, device=device)
        for name in self.counted:
            gradient = gradients[name]
            if not gradient.numel():
                continue
            rows = gradient.reshape(len(gradient) if gradient.dim() else 1, -1)
            sums = fold(rows.to(self.dtype).square())
            found[self.starts[name] : self.starts[name] + len(sums)] = sums
        return found
