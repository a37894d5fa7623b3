"""Derives DTensor sharding rules of an operator from the names of its dims.

A contract lists the symbols along which an operator is independent. For such a symbol, tensors with
that dim are sharded along it and all others are replicated; a result without it, which occurs only
in a backward pass, is a partial sum.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from ms_kernels.core.plan import DimNames


class Spec(Protocol):
    """The part of `torch.distributed.tensor._dtensor_spec.DTensorSpec` that is used here."""

    @property
    def shape(self) -> Sequence[int]:
        """Global shape."""
        ...

    @property
    def mesh(self) -> Any:
        """Device mesh."""
        ...


def shardings(
    splits: Sequence[str],
    inputs: Sequence[tuple[DimNames, Spec | None]],
    outputs: Sequence[DimNames],
    options: int,
) -> list[tuple[list[Placement], list[Placement | None]]]:
    """Return all valid placements of a call's tensors along one mesh axis.

    Args:
        splits: symbols that may be sharded; symbols to shard together share one string.
        inputs: dims and spec of each tensor argument; the spec is None for an absent one.
        outputs: dims of each result.
        options: number of non-tensor arguments that follow.

    Returns:
        Pairs (placements of the outputs, placements of the inputs); the first replicates all.
    """
    replicated: list[Placement | None] = [
        None if spec is None else Replicate() for _, spec in inputs
    ]
    ways: list[tuple[list[Placement], list[Placement | None]]] = [
        ([Replicate() for _ in outputs], replicated + [None] * options)
    ]
    leading = _leading(inputs)
    for split in splits:
        symbols = frozenset(split.split())
        if not _divides(symbols, inputs):
            continue
        # `...` may be sharded along each of the dims that it matches.
        for offset in range(leading) if "..." in symbols else (0,):
            placements: list[Placement | None] = [
                None if spec is None else _placement(dims, symbols, leading, offset, spec.shape)
                for dims, spec in inputs
            ]
            results = [_placement(dims, symbols, leading, offset, None) for dims in outputs]
            sums: list[Placement] = [
                Partial() if isinstance(result, Replicate) else result for result in results
            ]
            ways.append((sums, placements + [None] * options))
    return ways


def _leading(inputs: Sequence[tuple[DimNames, Spec | None]]) -> int:
    """Return the number of dims that ``...`` matches."""
    for dims, spec in inputs:
        if spec is not None and "..." in dims:
            return len(spec.shape) - len(dims) + 1
    return 0


def _placement(
    dims: DimNames, symbols: frozenset[str], leading: int, offset: int, shape: Sequence[int] | None
) -> Placement:
    """Shard a tensor along its first dim that is in `symbols`; replicate it otherwise."""
    dim = 0
    for name in dims:
        if name in symbols:
            shard_dim = dim + offset if name == "..." else dim
            # A dim of size 1 is broadcast, so every rank needs it.
            return Replicate() if shape is not None and shape[shard_dim] == 1 else Shard(shard_dim)
        dim += leading if name == "..." else 1
    return Replicate()


def _divides(symbols: frozenset[str], inputs: Sequence[tuple[DimNames, Spec | None]]) -> bool:
    """Whether dims that are sharded together, such as heads of q and k, divide evenly."""
    if len(symbols) == 1:
        return True
    return all(size == 1 or size % count == 0 for size, count in _sizes(symbols, inputs))


def _sizes(
    symbols: frozenset[str], inputs: Sequence[tuple[DimNames, Spec | None]]
) -> Iterator[tuple[int, int]]:
    for dims, spec in inputs:
        if spec is None:
            continue
        for dim, name in enumerate(dims):
            if name in symbols:
                yield spec.shape[dim], spec.mesh.size()
