"""Gradient norm, summed in the same order under every sharding."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ms_parallel.engine.reproducible.tree import fold
from ms_parallel.split.part import local_part, part_of


class FixedNorm:
    """Sums of squares, first within each matrix row, which is never split, then over all rows.

    Args:
        parameters: local trainable parameters by name.
        counted: names of the parameters that this process counts.
    """

    def __init__(self, parameters: Mapping[str, Tensor], counted: Sequence[str]) -> None:
        self.counted = counted
        # Full heights, because len() of a DTensor is its global length.
        local_lengths = {
            name: len(parameters[name]) if parameters[name].dim() else 1 for name in counted
        }
        lengths_by_rank = [local_lengths] * dist.get_world_size()
        dist.all_gather_object(lengths_by_rank, local_lengths)
        lengths = {
            name: count for rank_lengths in lengths_by_rank for name, count in rank_lengths.items()
        }
        self.starts: dict[str, int] = {}
        self.length = 0
        """Number of rows of all weights of the model."""
        # Sorted, so that every process gives each matrix row the same index.
        for name in sorted(lengths):
            self.starts[name], self.length = self.length, self.length + lengths[name]
        with torch.no_grad():
            for name in counted:
                offsets = part_of(parameters[name]).offsets  # this shard's first row
                self.starts[name] += offsets[0] if offsets else 0
        dtypes = [local_part(parameters[name]).dtype for name in counted]
        self.dtype = torch.float64 if torch.float64 in dtypes else torch.float32

    def squares(self, gradients: Mapping[str, Tensor], device: torch.device) -> Tensor:
        """Return the sum of squares of each row, (length,); 0 for rows of other processes."""
        squares = torch.zeros(self.length, dtype=self.dtype, device=device)
        for name in self.counted:
            gradient = gradients[name]
            if not gradient.numel():
                continue
            # (matrix rows, elements per row); a vector has one element per row.
            rows = gradient.reshape(len(gradient) if gradient.dim() else 1, -1)
            sums = fold(rows.to(self.dtype).square())
            squares[self.starts[name] : self.starts[name] + len(sums)] = sums
        return squares
