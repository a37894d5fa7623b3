"""How a folder's tensors make up a model's parameters, and its parameters a folder's tensors.

Where a matrix is one tensor on both sides under one name there is nothing to say. What is stacked,
fused, transposed or interleaved on one side is described by pieces: boxes of a parameter, and the
part of a folder's tensor that has the same values.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product

from attrs import frozen
from torch import Tensor

Box = tuple[slice, ...]
"""A range of each dim, as an index."""


@frozen(kw_only=True)
class WeightSlice:
    """A box of a parameter that has the values of a part of a folder's tensor."""

    tensor: str
    """Its name in the folder."""
    shape: tuple[int, ...]
    """Shape of the whole tensor in the folder."""
    part: Box
    """The part of that tensor; a slice may have a step."""
    box: Box
    """The box of the parameter."""
    dims: tuple[int | None, ...]
    """For each dim of the parameter the tensor's dim that runs along it, None where it has none and
    the box is one index wide."""

    def within(self, wanted: Box) -> tuple[Box, Box] | None:
        """Find what a box of the parameter takes of this piece.

        Returns:
            The part of the tensor to read, and where in `wanted` it goes; None for nothing.
        """
        part, place = list(self.part), []
        for own, other, dim in zip(self.box, wanted, self.dims, strict=True):
            start, stop = max(own.start, other.start), min(own.stop, other.stop)
            if start >= stop:
                return None
            place.append(slice(start - other.start, stop - other.start))
            if dim is not None:
                begin, step = self.part[dim].start, self.part[dim].step or 1
                first, end = begin + (start - own.start) * step, begin + (stop - own.start) * step
                part[dim] = slice(first, min(end, self.part[dim].stop), step)
        return tuple(part), tuple(place)

    def to_parameter(self, values: Tensor) -> Tensor:
        """Give values of (a part of) `part` the dims of the parameter."""
        along = [dim for dim in self.dims if dim is not None]
        turned = values.permute([*along, *(d for d in range(values.ndim) if d not in along)])
        sizes = [1 if dim is None else values.shape[dim] for dim in self.dims]
        return turned.reshape(sizes)

    def to_tensor(self, values: Tensor) -> Tensor:
        """Give values of `box` the dims of the folder's tensor."""
        along = [dim for dim in self.dims if dim is not None]
        kept = values.reshape(
            [values.shape[d] for d, dim in enumerate(self.dims) if dim is not None]
        )
        for dim in (d for d in range(len(self.shape)) if d not in along):
            kept, along = kept.unsqueeze(-1), [*along, dim]
        return kept.permute([along.index(dim) for dim in range(len(self.shape))])


Rule = Callable[[tuple[str, ...], tuple[int, ...]], Iterator[WeightSlice]]
"""From the parts of a name that a pattern's `*` stand for, and a parameter's whole shape."""

Rules = Mapping[str, Rule]
"""By pattern of parameter names, in which `*` stands for one part of a dotted name."""


def slices_of(rules: Rules, name: str, shape: Sequence[int]) -> Iterator[WeightSlice]:
    """Yield what makes up a parameter: by the first rule that fits, else its own name's tensor.

    Args:
        rules: of the model.
        name: of the parameter.
        shape: of the whole parameter.
    """
    for pattern, rule in rules.items():
        found = re.fullmatch(re.escape(pattern).replace(r"\*", r"([^.]+)"), name)
        if found:
            return rule(found.groups(), tuple(shape))
    return renamed(name)((), tuple(shape))


def renamed(tensor: str) -> Rule:
    """Make a rule: all of a tensor of another name; `{0}` stands for what the first `*` does."""

    def rule(stars: tuple[str, ...], shape: tuple[int, ...]) -> Iterator[WeightSlice]:
        every = tuple(slice(0, size) for size in shape)
        yield WeightSlice(
            tensor=tensor.format(*stars),
            shape=shape,
            part=every,
            box=every,
            dims=tuple(range(len(shape))),
        )

    return rule


def rows_of(tensor: str, first: int, total: int) -> Rule:
    """Make a rule for some rows of a tensor that holds several parameters one below the other.

    Args:
        tensor: its name, `{0}` for what the first `*` stands for.
        first: of the rows.
        total: rows of the tensor.
    """

    def rule(stars: tuple[str, ...], shape: tuple[int, ...]) -> Iterator[WeightSlice]:
        (whole,) = renamed(tensor)(stars, (total, *shape[1:]))
        rows, own = slice(first, first + shape[0]), slice(0, shape[0])
        yield WeightSlice(
            tensor=whole.tensor,
            shape=whole.shape,
            part=(rows, *whole.part[1:]),
            box=(own, *whole.box[1:]),
            dims=whole.dims,
        )

    return rule


def stacked(tensor: str, *matrices: str) -> Rule:
    """Make a rule of a tensor for each matrix of a parameter (experts, [several,] rows, columns).

    Args:
        tensor: its name, `{0}` for what the first `*` stands for, `{expert}` and `{matrix}`.
        matrices: names of the several matrices of an expert, in the parameter's order.
    """

    def rule(stars: tuple[str, ...], shape: tuple[int, ...]) -> Iterator[WeightSlice]:
        *outer, rows, columns = shape
        part = (slice(0, rows), slice(0, columns))
        for index in product(*map(range, outer)):
            matrix = matrices[index[1]] if len(index) > 1 else matrices[0]
            yield WeightSlice(
                tensor=tensor.format(*stars, expert=index[0], matrix=matrix),
                shape=(rows, columns),
                part=part,
                box=(*(slice(i, i + 1) for i in index), *part),
                dims=(*(None for _ in index), 0, 1),
            )

    return rule
