"""Mapping between the tensors of a checkpoint folder and the parameters of a model.

A parameter stored as one tensor of the same name needs no rule. Stacked, fused, transposed or
interleaved weights are described by slices: a box of the parameter, and the part of a checkpoint
tensor with the same values.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product

from attrs import frozen
from torch import Tensor

Box = tuple[slice, ...]
"""Index with one slice per dim."""


@frozen(kw_only=True)
class WeightSlice:
    """A box of a parameter with the same values as a part of a checkpoint tensor."""

    tensor: str
    """Name of the checkpoint tensor."""
    shape: tuple[int, ...]
    """Full shape of the checkpoint tensor."""
    part: Box
    """Part of the checkpoint tensor; slices may have a step."""
    box: Box
    """Box of the parameter."""
    dims: tuple[int | None, ...]
    """Tensor dim of each parameter dim; None for a dim that the tensor lacks (box size 1)."""

    def within(self, region: Box) -> tuple[Box, Box] | None:
        """Intersect this slice with a box of the parameter.

        Returns:
            Part of the tensor to read and its destination within `region`; None if disjoint.
        """
        part, target = list(self.part), []
        for box, query, dim in zip(self.box, region, self.dims, strict=True):
            start, stop = max(box.start, query.start), min(box.stop, query.stop)
            if start >= stop:
                return None
            target.append(slice(start - query.start, stop - query.start))
            if dim is not None:
                # Interleaved weights have a step, so offsets in the box are scaled by it.
                base, step = self.part[dim].start, self.part[dim].step or 1
                first, end = base + (start - box.start) * step, base + (stop - box.start) * step
                part[dim] = slice(first, min(end, self.part[dim].stop), step)
        return tuple(part), tuple(target)

    def to_parameter(self, values: Tensor) -> Tensor:
        """Permute values of (a part of) `part` to the dims of the parameter."""
        # Dims of the tensor in the order of the parameter's dims; dims that only the tensor has
        # come last and have size 1.
        along = [dim for dim in self.dims if dim is not None]
        permuted = values.permute([*along, *(d for d in range(values.ndim) if d not in along)])
        sizes = [1 if dim is None else values.shape[dim] for dim in self.dims]
        return permuted.reshape(sizes)

    def to_tensor(self, values: Tensor) -> Tensor:
        """Permute values of `box` to the dims of the checkpoint tensor."""
        # Inverse of `to_parameter`: drop the dims that the tensor lacks, append the dims that only
        # the tensor has, and permute.
        along = [dim for dim in self.dims if dim is not None]
        squeezed = values.reshape(
            [values.shape[d] for d, dim in enumerate(self.dims) if dim is not None]
        )
        for dim in (d for d in range(len(self.shape)) if d not in along):
            squeezed, along = squeezed.unsqueeze(-1), [*along, dim]
        return squeezed.permute([along.index(dim) for dim in range(len(self.shape))])


WeightRule = Callable[[tuple[str, ...], tuple[int, ...]], Iterator[WeightSlice]]
"""Yields slices, given the name parts matched by `*` and the full shape of the parameter."""

WeightRules = Mapping[str, WeightRule]
"""Rules by pattern of parameter names; `*` matches one part of a dotted name."""


def slices_of(rules: WeightRules, name: str, shape: Sequence[int]) -> Iterator[WeightSlice]:
    """Yield a parameter's slices by the first matching rule, or the tensor of the same name.

    Args:
        rules: rules of the model.
        name: parameter name.
        shape: full shape of the parameter.
    """
    for pattern, rule in rules.items():
        match = re.fullmatch(re.escape(pattern).replace(r"\*", r"([^.]+)"), name)
        if match:
            return rule(match.groups(), tuple(shape))
    return renamed(name)((), tuple(shape))


def renamed(tensor: str) -> WeightRule:
    """Return a rule for a tensor with another name, in which `{0}` is the first `*` match."""

    def rule(wildcards: tuple[str, ...], shape: tuple[int, ...]) -> Iterator[WeightSlice]:
        full = tuple(slice(0, size) for size in shape)
        yield WeightSlice(
            tensor=tensor.format(*wildcards),
            shape=shape,
            part=full,
            box=full,
            dims=tuple(range(len(shape))),
        )

    return rule


def rows_of(tensor: str, first: int, total: int) -> WeightRule:
    """Return a rule for a row range of a tensor that concatenates several parameters.

    Args:
        tensor: tensor name, in which `{0}` is the first `*` match.
        first: first row.
        total: number of rows of the tensor.
    """

    def rule(wildcards: tuple[str, ...], shape: tuple[int, ...]) -> Iterator[WeightSlice]:
        (full,) = renamed(tensor)(wildcards, (total, *shape[1:]))
        rows, all_rows = slice(first, first + shape[0]), slice(0, shape[0])
        yield WeightSlice(
            tensor=full.tensor,
            shape=full.shape,
            part=(rows, *full.part[1:]),
            box=(all_rows, *full.box[1:]),
            dims=full.dims,
        )

    return rule


def stacked(tensor: str, *matrices: str) -> WeightRule:
    """Return a rule for a parameter (experts, [matrices,] rows, columns) stored one matrix each.

    Args:
        tensor: tensor name with `{0}` for the first `*` match, `{expert}` and `{matrix}`.
        matrices: matrix names of an expert, in the parameter's order.
    """

    def rule(wildcards: tuple[str, ...], shape: tuple[int, ...]) -> Iterator[WeightSlice]:
        *outer, rows, columns = shape
        part = (slice(0, rows), slice(0, columns))
        for index in product(*map(range, outer)):
            matrix = matrices[index[1]] if len(index) > 1 else matrices[0]
            yield WeightSlice(
                tensor=tensor.format(*wildcards, expert=index[0], matrix=matrix),
                shape=(rows, columns),
                part=part,
                box=(*(slice(i, i + 1) for i in index), *part),
                dims=(*(None for _ in index), 0, 1),
            )

    return rule
