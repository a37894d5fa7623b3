"""Draws initial weights as a pure function of seed, parameter name and whole shape.

Every layout therefore starts from the same model. Values are drawn in chunks of whole rows with a
generator each, so that a rank draws only the chunks that its part touches.
"""

import hashlib
import math
from collections.abc import Collection
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ms_parallel.models.registry import model_plan, weight_shapes
from ms_parallel.models.staged import named_weights
from ms_parallel.split.part import part_of

_CHUNK_ELEMENTS = 1 << 20


@runtime_checkable
class DrawsItself(Protocol):
    """A model that knows how its parameters begin."""

    def draw(self, name: str, seed: int) -> Tensor:
        """Draw the whole fresh value of a parameter, the same wherever it is drawn."""


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Fill every parameter, plain or DTensor, in place.

    Matrices are normal with the config's `initializer_range`, biases zero, norms neutral. A copy of
    a tied weight draws under its owner's name, and so equals it. What the architecture does not
    have, and a preparation has added, is zero.

    Args:
        model: Any stage under any layout, with a `config`; parameters must not be on `meta`.
        seed: Of the run.
    """
    std: float = model.config.initializer_range  # type: ignore[union-attr,assignment]
    owners = {copy: owner for owner, copy in model_plan(model.config).tied}  # type: ignore[arg-type]
    own = weight_shapes(model.config)  # type: ignore[arg-type]
    for name, parameter in named_weights(model):
        drawn_as = owners.get(name, name)
        if is_added(drawn_as, own):
            parameter.zero_()
        elif isinstance(model, DrawsItself):
            part = part_of(parameter)
            part.local.copy_(model.draw(name, seed)[part.box])
        elif name.endswith("bias"):
            parameter.zero_()
        elif parameter.ndim == 1:
            norm = model.get_submodule(name.rpartition(".")[0])
            parameter.fill_(getattr(norm, "neutral", 1.0))
        else:
            _fill_normal(parameter, drawn_as, seed, std)


def is_added(name: str, own: Collection[str]) -> bool:
    """Return whether a weight is not the architecture's `own`, but was added by the engine."""
    return name not in own and name.rpartition(".")[2] not in ("weight", "bias")


def _fill_normal(parameter: Tensor, name: str, seed: int, std: float) -> None:
    shape, part = parameter.shape, part_of(parameter)
    if part.local.numel() == 0:
        return
    rows_box, *inner = part.box
    per_chunk = max(1, _CHUNK_ELEMENTS // math.prod(shape[1:]))
    first, end = rows_box.start, rows_box.stop
    for chunk in range(first // per_chunk, -(-end // per_chunk)):
        start = chunk * per_chunk
        rows = min(per_chunk, shape[0] - start)
        drawn = torch.empty(rows, *shape[1:])
        drawn.normal_(0.0, std, generator=_generator(seed, name, chunk))
        low, high = max(first, start), min(end, start + rows)
        part.local[low - first : high - first] = drawn[(slice(low - start, high - start), *inner)]


def _generator(seed: int, name: str, chunk: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}/{chunk}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
