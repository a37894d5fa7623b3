"""Initializes weights as a pure function of seed, parameter name and global shape.

Every layout therefore starts from the same model. Values are drawn in chunks of full rows with one
generator each, so that a rank draws only the chunks that overlap its part, and several threads draw
different chunks.
"""

import hashlib
import math
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, runtime_checkable

import torch
from attrs import frozen
from torch import Tensor, nn

from ms_parallel.arguments import check_integer, shown
from ms_parallel.errors import ModelError
from ms_parallel.models.registry import model_plan, weight_shapes
from ms_parallel.models.staged import named_weights
from ms_parallel.split.part import part_of

_CHUNK_ELEMENTS = 1 << 20


@runtime_checkable
class InitializesItself(Protocol):
    """A model with its own initialization."""

    def draw(self, name: str, seed: int) -> Tensor:
        """Return the initial value of a full parameter; a pure function of the arguments."""


@torch.no_grad()
def initialize(model: nn.Module, seed: int) -> None:
    """Fill every parameter, plain or DTensor, in place.

    Matrices are normal with the config's `initializer_range`, biases are zero, and norms are
    neutral. A tied copy uses its owner's name, so both are equal. Parameters that the engine has
    added, such as adapters, are zero.

    Args:
        model: any stage under any layout, with a `config`; parameters must not be on `meta`.
        seed: seed of the run.

    Raises:
        ModelError: model has no config, or seed is not an integer.
    """
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise ModelError(f"model must be a torch.nn.Module with a config, got {shown(model)}")
    check_integer("seed", seed, minimum=0, error=ModelError)
    std: float = model.config.initializer_range  # type: ignore[union-attr,assignment]
    owners = {copy: owner for owner, copy in model_plan(model.config).tied}  # type: ignore[arg-type]
    architecture_names = weight_shapes(model.config)  # type: ignore[arg-type]
    chunks: list[_Chunk] = []
    for name, parameter in named_weights(model):
        seed_name = owners.get(name, name)
        if is_added(seed_name, architecture_names):
            parameter.zero_()
        elif isinstance(model, InitializesItself):
            part = part_of(parameter)
            part.local.copy_(model.draw(name, seed)[part.box])
        elif name.endswith("bias"):
            parameter.zero_()
        elif parameter.ndim == 1:
            norm = model.get_submodule(name.rpartition(".")[0])
            parameter.fill_(getattr(norm, "neutral", 1.0))
        else:
            chunks += _chunks(parameter, seed_name)
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        # Iterate over the results, so that an error in a thread is raised here.
        list(threads.map(lambda chunk: chunk.fill(seed, std), chunks))


def is_added(name: str, architecture_names: Collection[str]) -> bool:
    """Return whether a weight is not part of the architecture, but was added by the engine."""
    return name not in architecture_names and name.rpartition(".")[2] not in ("weight", "bias")


@frozen(kw_only=True)
class _Chunk:
    """Full rows of a weight that overlap this process's part."""

    name: str
    number: int
    shape: tuple[int, ...]
    """Shape of the chunk."""
    target: Tensor
    """Local part of the weight that the chunk fills."""
    source: tuple[slice, ...]
    """Box of `target` in the chunk."""

    @torch.no_grad()
    def fill(self, seed: int, std: float) -> None:
        """Draw the chunk and copy the local part."""
        # Draw the full chunk, so values do not depend on which rows are local.
        values = torch.empty(self.shape)
        # In float32 on the CPU: the same numbers for every dtype and device of the weight.
        values.normal_(0.0, std, generator=_generator(seed, self.name, self.number))
        self.target.copy_(values[self.source])


def _chunks(parameter: Tensor, name: str) -> Iterator[_Chunk]:
    """Yield the chunks of a parameter that overlap its local part."""
    shape, part = parameter.shape, part_of(parameter)
    if part.local.numel() == 0:
        return
    rows_box, *inner = part.box
    # Chunks depend on the global shape alone, never on the layout.
    per_chunk = max(1, _CHUNK_ELEMENTS // math.prod(shape[1:]))  # rows per chunk
    row_start, row_stop = rows_box.start, rows_box.stop
    for number in range(row_start // per_chunk, -(-row_stop // per_chunk)):
        start = number * per_chunk
        rows = min(per_chunk, shape[0] - start)
        low, high = max(row_start, start), min(row_stop, start + rows)
        yield _Chunk(
            name=name,
            number=number,
            shape=(rows, *shape[1:]),
            target=part.local[low - row_start : high - row_start],
            source=(slice(low - start, high - start), *inner),
        )


def _generator(seed: int, name: str, chunk: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}/{chunk}".encode()).digest()
    # 63 bits of the hash, not negative as a signed seed.
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
