"""Fresh weights as a pure function of seed, parameter name and whole shape.

Every layout therefore starts from the same model. Values are drawn in chunks of whole rows with a
generator each, so that a rank draws only the chunks that its part touches.
"""

import hashlib
import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

__all__ = ["initialise"]

_CHUNK_ELEMENTS = 1 << 20


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Fill every parameter, plain or DTensor, in place.

    Matrices are normal with the config's `initializer_range`, biases zero, norms one. A copy of a
    tied weight draws under its owner's name, and so equals it.

    Args:
        model: Any stage under any layout, with a `config`; parameters must not be on `meta`.
        seed: Of the run.
    """
    std: float = model.config.initializer_range  # type: ignore[union-attr,assignment]
    tied = bool(model.config.tie_word_embeddings)  # type: ignore[union-attr]
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.ndim == 1:
            parameter.fill_(1.0)
        else:
            drawn_as = "model.embed_tokens.weight" if tied and name == "lm_head.weight" else name
            _fill_normal(parameter, drawn_as, seed, std)


def _fill_normal(parameter: Tensor, name: str, seed: int, std: float) -> None:
    shape = tuple(parameter.shape)
    if isinstance(parameter, DTensor):
        local = parameter.to_local()
        if local.numel() == 0:
            return
        (chunk,) = parameter.__create_chunk_list__()  # type: ignore[no-untyped-call]
        offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
    else:
        local, offsets, sizes = parameter, (0,) * len(shape), shape
    per_chunk = max(1, _CHUNK_ELEMENTS // math.prod(shape[1:]))
    first, end = offsets[0], offsets[0] + sizes[0]
    inner = tuple(slice(o, o + n) for o, n in zip(offsets[1:], sizes[1:], strict=True))
    for chunk_index in range(first // per_chunk, -(-end // per_chunk)):
        start = chunk_index * per_chunk
        rows = min(per_chunk, shape[0] - start)
        drawn = torch.empty(rows, *shape[1:])
        drawn.normal_(0.0, std, generator=_generator(seed, name, chunk_index))
        low, high = max(first, start), min(end, start + rows)
        local[low - first : high - first].copy_(drawn[(slice(low - start, high - start), *inner)])


def _generator(seed: int, name: str, chunk: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}/{chunk}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
