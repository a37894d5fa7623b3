"""Says how DTensor may split an operator over processes, from the names of its dims.

A contract says along which symbols an operator falls into pieces that know nothing of each other.
Then every tensor that has such a dim is split along it, every other is whole on each process; a
result without it, which only a backward pass has, is a sum over the pieces.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from ms_kernels.core.plan import DimNames


class Spec(Protocol):
    """What DTensor knows of a tensor: `torch.distributed.tensor._dtensor_spec.DTensorSpec`."""

    @property
    def shape(self) -> Sequence[int]:
        """Its sizes over all processes."""
        ...

    @property
    def mesh(self) -> Any:
        """The processes."""
        ...


def shardings(
    splits: Sequence[str],
    inputs: Sequence[tuple[DimNames, Spec | None]],
    outputs: Sequence[DimNames],
    options: int,
) -> list[tuple[list[Placement], list[Placement | None]]]:
    """Return every way to place the tensors of a call along one axis of a mesh.

    Args:
        splits: symbols that may be split, those that must be split together in one string.
        inputs: dims of each tensor argument, and what is known of it; None for one left out.
        outputs: dims of each result.
        options: how many other arguments follow.

    Returns:
        Placements of the outputs beside those of the inputs; the first way is to split nothing.
    """
    whole: list[Placement | None] = [None if spec is None else Replicate() for _, spec in inputs]
    everywhere: list[Placement] = [Replicate() for _ in outputs]
    ways = [(everywhere, whole + [None] * options)]
    leading = _leading(inputs)
    for split in splits:
        symbols = frozenset(split.split())
        if not _divides(symbols, inputs):
            continue
        for offset in range(leading) if "..." in symbols else (0,):
            placed: list[Placement | None] = [
                None if spec is None else _place(dims, symbols, leading, offset, spec.shape)
                for dims, spec in inputs
            ]
            results = [_place(dims, symbols, leading, offset, None) for dims in outputs]
            pieces: list[Placement] = [
                Partial() if isinstance(each, Replicate) else each for each in results
            ]
            ways.append((pieces, placed + [None] * options))
    return ways


def _leading(inputs: Sequence[tuple[DimNames, Spec | None]]) -> int:
    """Return how many dims ``...`` stands for."""
    for dims, spec in inputs:
        if spec is not None and "..." in dims:
            return len(spec.shape) - len(dims) + 1
    return 0


def _place(
    dims: DimNames, symbols: frozenset[str], leading: int, offset: int, shape: Sequence[int] | None
) -> Placement:
    """Split a tensor along the first of its dims that is among `symbols`, if any."""
    at = 0
    for name in dims:
        if name in symbols:
            place = at + offset if name == "..." else at
            # A size of 1 is broadcast: every piece needs it.
            return Replicate() if shape is not None and shape[place] == 1 else Shard(place)
        at += leading if name == "..." else 1
    return Replicate()


def _divides(symbols: frozenset[str], inputs: Sequence[tuple[DimNames, Spec | None]]) -> bool:
    """Return whether dims that go together, as heads of q and k do, can be cut alike."""
    if len(symbols) == 1:
        return True
    return all(size == 1 or size % count == 0 for size, count in _sizes(symbols, inputs))


def _sizes(
    symbols: frozenset[str], inputs: Sequence[tuple[DimNames, Spec | None]]
) -> Iterator[tuple[int, int]]:
    for dims, spec in inputs:
        if spec is None:
            continue
        for place, name in enumerate(dims):
            if name in symbols:
                yield spec.shape[place], spec.mesh.size()
