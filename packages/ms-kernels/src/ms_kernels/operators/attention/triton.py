"""FlashAttention in Triton, with grouped queries, windows, documents, KV cache and sinks."""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ms_kernels.backends.triton.configuration import grid, tuned_kernels
from ms_kernels.backends.triton.implementation import narrow_heads, on_gpu
from ms_kernels.backends.triton.launching import blocks, launch, power_of_two
from ms_kernels.backends.triton.rows import empty, needed_grads, with_unit_stride
from ms_kernels.core.entries import DTYPES, Entry, entry
from ms_kernels.core.launches import ANY_SIZE, Defaults, TableKey, TunedKernel, key_of
from ms_kernels.core.plan import needs_grad
from ms_kernels.operators.attention.contract import CONTRACT, MaskOptions

LOG2_E = 1.4426950408889634
MIN_WIDTH = 32
"""Minimum tile width in features.

`tl.dot` allows 16, but ptxas 12.8, bundled with Triton 3.6, compiles some products of 16 columns
for sm_90 into reads outside shared memory: on an H100, bfloat16 and float16 heads of 24 features
with values of 8 gave wrong results or an illegal memory access. ptxas 12.9 and 13.0 compile the
same code correctly.
"""


def _by_width(*values: tuple[int, int, int, int]) -> Defaults:
    """Build defaults from (BM, BN, warps, stages) for heads up to 64, up to 128, and wider."""
    names = ("BM", "BN", "num_warps", "num_stages")
    return tuple(
        (width, dict(zip(names, settings, strict=True)))
        for width, settings in zip((64, 128, ANY_SIZE), values, strict=True)
    )


def _tuned(name: str, half: Defaults, single: Defaults) -> tuple[TunedKernel, ...]:
    return tuned_kernels(
        "attention",
        name,
        sizes="D",
        tried_at=tuple(
            {"B": 2, "Sq": 4096, "Sk": 4096, "Hq": 16, "Hk": 4, "D": width, "Dv": width}
            for width in (64, 128)
        ),
        candidates=grid(BM=(64, 128), BN=(32, 64, 128), num_warps=(4, 8), num_stages=(2, 3)),
        defaults=half,
        wide_defaults=single,
    )


TUNED = (
    *_tuned(
        "attention_forward",
        _by_width((128, 64, 4, 2), (128, 32, 4, 1), (64, 32, 8, 1)),
        _by_width((64, 32, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1)),
    ),
    *_tuned(
        "attention_backward_queries attention_backward_keys",
        _by_width((64, 64, 8, 1), (32, 64, 8, 1), (32, 32, 8, 1)),
        _by_width((32, 32, 4, 1), (16, 32, 4, 1), (16, 16, 4, 1)),
    ),
)
FORWARD, BACKWARD_QUERIES, BACKWARD_KEYS = TUNED
KERNELS = f"{__package__}.kernels"
SINKS = {"BM": 1024, "num_warps": 4}
"""Launch parameters of the kernel for the sinks' gradient."""


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    sinks: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    """Return the output (B, Sq, Hq, Dv) and the base-2 logsumexp of the scores (B, Hq, Sq)."""
    q, k, v = with_unit_stride(q), with_unit_stride(k), with_unit_stride(v)
    batch, queries, heads, width = q.shape
    settings = MaskOptions(*options)
    result = q.new_empty((*q.shape[:3], v.shape[3]))
    lse = q.new_empty((batch, heads, queries), dtype=torch.float32)
    constants = _constants(FORWARD, key_of(q), width, v.shape[3])
    # The kernels use exp2, so the scale includes log2(e).
    factor = settings.factor(width) * LOG2_E
    sinks_or_dummy = q if sinks is None else sinks.contiguous()
    launch(
        f"{KERNELS}.attention_forward",
        batch * heads * blocks(queries, constants["BM"]),
        q,
        *(q, k, v, *_tables(documents, q, constants, of_keys=False), sinks_or_dummy, result, lse),
        *(*_sizes(q, k, v), k.shape[1], factor, _window(settings, k)),
        **_masks(settings, documents),
        SINK=sinks is not None,
        **constants,
    )
    return result, lse


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    sinks: Tensor | None,
    result: Tensor,
    lse: Tensor,
    grad_mask: int,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    settings = MaskOptions(*options)
    q, k, v = with_unit_stride(q), with_unit_stride(k), with_unit_stride(v)
    batch, queries, heads, width = q.shape
    by_queries = _constants(BACKWARD_QUERIES, key_of(q), width, v.shape[3])
    by_keys = _constants(BACKWARD_KEYS, key_of(q), width, v.shape[3])
    tiles = batch * heads * blocks(queries, by_queries["BM"])
    key_tiles = batch * k.shape[2] * blocks(k.shape[1], by_keys["BN"])
    # delta = rowsum(dO * O), which the gradient of the softmax subtracts (FlashAttention-2).
    delta, strides = torch.empty_like(lse), grad.stride()[:3]
    shape = queries, heads, v.shape[3]
    delta_constants = {name: by_queries[name] for name in ("BM", "BV")}
    kernel = f"{KERNELS}.attention_delta"
    launch(kernel, tiles, q, result, grad, delta, *shape, *strides, **delta_constants)
    grads = empty(q), empty(k), empty(v)
    factor = settings.factor(width)
    sizes = (*_sizes(q, k, v), *strides, k.shape[1], factor, _window(settings, k))
    # One kernel computes dq by blocks of queries, the other dk and dv by blocks of keys, so that
    # neither needs atomic additions.
    for kernel, count, constants, out in (
        ("attention_backward_queries", tiles, by_queries, grads[:1]),
        ("attention_backward_keys", key_tiles, by_keys, grads[1:]),
    ):
        tables = _tables(documents, q, constants, of_keys=len(out) == 2)
        launch(
            f"{KERNELS}.{kernel}",
            count,
            q,
            *(q, k, v, *tables, grad, lse, delta, *out, *sizes),
            **_masks(settings, documents),
            **constants,
        )
    sinks_grad = q.new_empty(0) if sinks is None else empty(sinks)
    if sinks is not None and needs_grad(grad_mask, 3):
        kernel = f"{KERNELS}.attention_backward_sinks"
        rows = batch, queries, heads
        launch(kernel, heads, q, sinks.contiguous(), lse, delta, sinks_grad, *rows, **SINKS)
    return needed_grads(grad_mask, (*grads, sinks_grad))


def _window(options: MaskOptions, keys: Tensor) -> int:
    """Return the window clipped to the number of keys, so that it fits in 32 bits."""
    return min(options.window or 0, keys.shape[1])


def _constants(kernel: TunedKernel, key: TableKey, width: int, values: int) -> dict[str, int]:
    """Return a launch's constants for `width` head features and `values` value features."""
    tile_width, value_tile_width = (max(power_of_two(n), MIN_WIDTH) for n in (width, values))
    same = {"SAME": width == values}
    return {**kernel.values(key, width), **same, "BD": tile_width, "BV": value_tile_width}


def _sizes(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    """Return queries, keys, heads, group size, both widths, and three strides of each tensor."""
    shape = (q.shape[1], k.shape[1], q.shape[2], q.shape[2] // k.shape[2], q.shape[3], v.shape[3])
    return (*shape, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3])


def _masks(options: MaskOptions, documents: Tensor | None) -> dict[str, bool]:
    has_window, has_documents = options.window is not None, documents is not None
    return {"CAUSAL": options.causal, "WINDOW": has_window, "DOCUMENTS": has_documents}


def _tables(
    documents: Tensor | None, q: Tensor, constants: dict[str, int], *, of_keys: bool
) -> tuple[Tensor, Tensor]:
    """Return the documents and their block ranges; without documents, two unused dummies."""
    if documents is None:
        return q, q
    blocks_of = (constants["BM"], constants["BN"])
    return _recent.of(documents, q.shape[1], *blocks_of, of_keys=of_keys)


class _RecentRanges:
    """Remembers the block ranges of the last `documents`: all layers of a batch share them.

    Keyed by the tensor object and its version, and dropped with the tensor.
    """

    def __init__(self) -> None:
        self._documents: weakref.ref[Tensor] | None = None
        self._version = 0
        self._ranges: dict[tuple[int, int, int, bool], tuple[Tensor, Tensor]] = {}

    def of(
        self, documents: Tensor, queries: int, query_block: int, key_block: int, *, of_keys: bool
    ) -> tuple[Tensor, Tensor]:
        """Return contiguous documents (B, Sk) and the ranges for blocks of queries or of keys."""
        # Tensors made in inference mode have no version counter.
        version = 0 if documents.is_inference() else documents._version
        # Compare the object and not its address, which a later tensor may reuse.
        cached = self._documents is not None and self._documents() is documents
        if not cached or self._version != version:
            self._ranges = {}
            self._documents = weakref.ref(documents, self._forget)
            self._version = version
        key = queries, query_block, key_block, of_keys
        if key not in self._ranges:
            contiguous = documents.contiguous()
            ranges = document_ranges(contiguous, queries, query_block, key_block, of_keys=of_keys)
            self._ranges[key] = contiguous, ranges
        return self._ranges[key]

    def _forget(self, dropped: "weakref.ref[Tensor]") -> None:
        if self._documents is dropped:
            self._documents, self._ranges = None, {}


_recent = _RecentRanges()


def document_ranges(
    documents: Tensor, queries: int, query_block: int, key_block: int, *, of_keys: bool = False
) -> Tensor:
    """Compute which blocks of queries and keys share a document, or hold only the same one.

    A block is described by its smallest and largest document, so a range of blocks that share a
    document may include some that are fully masked.

    Args:
        documents: document of each position, (B, Sk), contiguous.
        queries: number of queries Sq, the last of the Sk positions.
        query_block: queries per block.
        key_block: keys per block.
        of_keys: return ranges of query blocks per key block, instead of the reverse.

    Returns:
        (B, blocks, 4) int32: the range [start, end) of blocks of the other kind that share a
        document with each block, and the range of those in the same single document.
    """
    batch, keys = documents.shape
    sides = [
        (keys - queries, blocks(queries, query_block), query_block),
        (0, blocks(keys, key_block), key_block),
    ]
    (start, count, size), (other_start, other_count, other_size) = sides[::-1] if of_keys else sides
    ranges = documents.new_empty((batch, count, 4), dtype=torch.int32)
    launch(
        f"{KERNELS}.attention_ranges",
        batch * count,
        documents,
        *(documents, ranges, keys, documents.stride(0), start, count, other_start, other_count),
        B=size,
        OTHER=other_size,
        num_warps=2,
    )
    return ranges


def entries(chip: str, dtype: str) -> Iterator[Entry]:
    """Yield the kernels of an ahead-of-time compiled library.

    Heads of 64 and 128 features, causal and with all masks; heads of 64 features with sinks; and in
    half precision MLA heads of 192 features with 128 value features.
    """
    key, queries = TableKey(chip, DTYPES[dtype]), "batch * heads * cdiv(queries, BM)"
    tiles = queries, queries, "batch * (heads / group) * cdiv(keys, BN)"
    mla = ((192, 128, "192_128"),) if dtype != "fp32" else ()
    for width, values, name in ((64, 64, "64"), (128, 128, "128"), *mla):
        for detail, masked in (("causal", False), ("masked", True)):
            masks = {"CAUSAL": True, "WINDOW": masked, "DOCUMENTS": masked}
            for kernel, count in zip(TUNED, tiles, strict=True):
                constants = {**_constants(kernel, key, width, values), **masks}
                sink = {"SINK": False} if kernel is FORWARD else {}
                yield _entry(kernel.name, dtype, f"{name}_{detail}", {**constants, **sink}, count)
                if kernel is FORWARD and width == 64:
                    sink = {"SINK": True}
                    detail_ = f"{name}_{detail}_sinks"
                    yield _entry(kernel.name, dtype, detail_, {**constants, **sink}, count)
        if values == width:
            block = _constants(BACKWARD_QUERIES, key, width, values)
            constants = {name: block[name] for name in ("BM", "BV")}
            yield _entry("attention_delta", dtype, f"{width}", constants, queries)
    yield _entry("attention_backward_sinks", dtype, "", SINKS, "heads")


def _entry(kernel: str, dtype: str, detail: str, constants: dict[str, int], tiles: str) -> Entry:
    widths = {"width": "BD", "value_width": "BV"}
    return entry(
        "attention",
        f"{KERNELS}.{kernel}",
        dtype,
        detail,
        constants,
        tiles,
        fp32="LSE DELTA scale",
        i32="DOCUMENT RANGES",
        limits={name: limit for name, limit in widths.items() if limit in constants},
        extra=() if kernel == "attention_backward_sinks" else ("batch",),
    )


IMPLEMENTATION = on_gpu(
    CONTRACT,
    "never materializes the scores; skips blocks that are fully masked",
    tuned=TUNED,
    entries=entries,
    refuses=narrow_heads,
    forward=_forward,
    intermediates={"lse": "B Hq Sq"},
    backward=_backward,
    saves=("q", "k", "v", "documents", "sinks", "result", "lse"),
)
