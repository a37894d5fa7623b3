"""Gated delta rule step by step with the state in registers; nothing is saved but the inputs.

The backward pass runs forward once to save a state every √S positions, then goes backward.
"""

from collections.abc import Iterator
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from ms_kernels.backends.triton.configuration import grid, tuned_kernels
from ms_kernels.backends.triton.implementation import narrow_heads, on_gpu
from ms_kernels.backends.triton.launching import blocks, launch, power_of_two
from ms_kernels.backends.triton.rows import empty, needed_grads, with_unit_stride
from ms_kernels.core.entries import DTYPES, Entry, entry
from ms_kernels.core.launches import ANY_SIZE, TableKey, TunedKernel, key_of
from ms_kernels.core.torch_operator import opaque
from ms_kernels.operators.gated_delta_rule.contract import CONTRACT, NORM_EPS, RuleOptions

MAX_POSITIONS = 64
"""Maximum positions between two saved states; the states between them go through memory."""

FORWARD, BACKWARD = TUNED = tuned_kernels(
    "gated_delta_rule",
    "delta_forward delta_backward",
    sizes="D",
    tried_at=({"B": 4, "S": 2048, "Hk": 16, "Hv": 32, "D": 128, "Dv": 128},),
    candidates=grid(BV=(8, 16, 32), num_warps=(1, 2, 4)),
    defaults=((128, {"BV": 16, "num_warps": 4}), (ANY_SIZE, {"BV": 8, "num_warps": 4})),
    wide_defaults=((ANY_SIZE, {"BV": 8, "num_warps": 4}),),
)
KERNELS = f"{__package__}.kernels"


def gated_delta_rule(*args: Any) -> Tensor | tuple[Tensor, Tensor]:
    """Return the output of each position; with `final_state` also the state after the last one."""
    results: tuple[Tensor, Tensor] = _rule(*args)
    return results if args[-1] else results[0]


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    documents: Tensor | None,
    state: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    result, final = _fake(q, k, v, g, beta, documents, state, *options)
    _run_forward((q, k, v, g, beta, documents, state), options, result, final, None)
    return result, final


def _fake(q: Tensor, k: Tensor, v: Tensor, *unused: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(v.shape), _sums(q, len(q), v.shape[2], q.shape[3], v.shape[3])


def _sums(like: Tensor, *sizes: int) -> Tensor:
    """Return an uninitialized float32 tensor on the device of `like`."""
    return like.new_empty(sizes, dtype=torch.float32)


def _run_forward(
    tensors: tuple[Tensor | None, ...],
    options: tuple[Any, ...],
    result: Tensor,
    final: Tensor,
    saved: Tensor | None,
) -> None:
    """Run forward over the positions; write results and final state, or the states to save."""
    q, k, v, g, beta, documents, state = _with_unit_strides(*tensors)
    constants = _constants(FORWARD, key_of(q), q.shape[3])
    launch(
        f"{KERNELS}.delta_forward",
        _tiles(v, constants),
        q,
        *(q, k, v, g, beta, documents, state, result, final, final if saved is None else saved),
        *(*_sizes(q, k, v), RuleOptions(*options).factor(q.shape[3]), _part_length(q.shape[1])),
        NORMALIZE=options[1],
        CUT=tensors[5] is not None,
        HAS_STATE=tensors[6] is not None,
        SAVE=saved is not None,
        **constants,
    )


def _backward(
    grad: Tensor,
    grad_final: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    documents: Tensor | None,
    state: Tensor | None,
    grad_mask: int,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    settings, part_length = RuleOptions(*options), _part_length(q.shape[1])
    batch, positions, heads, out_width = v.shape
    width, groups = q.shape[3], q.shape[2]
    grad_state = _sums(q, batch, heads, width, out_width)
    parts = blocks(positions, part_length)
    saved = _sums(q, batch, heads, parts, width, out_width)  # one state per part
    # Recompute the states at the part boundaries; forward saved only its inputs.
    _run_forward((q, k, v, g, beta, documents, state), options, grad, grad_state, saved)
    constants = _constants(BACKWARD, key_of(q), width)
    tiles, columns = _tiles(v, constants), blocks(out_width, constants["BV"])
    # States within one part.
    scratch = _sums(q, tiles, part_length, constants["BD"], constants["BV"])
    # Per block of columns; summed below.
    partial_q, partial_k = _sums(q, 2, columns, batch, positions, heads, width)
    partial_g, partial_beta = _sums(q, 2, columns, batch, positions, heads)
    grad_v = empty(v)
    inputs = _with_unit_strides(q, k, v, g, beta, documents)
    final_grad = grad_state if grad_final is None else grad_final
    launch(
        f"{KERNELS}.delta_backward",
        tiles,
        q,
        *(
            *inputs,
            saved,
            scratch,
            grad,
            final_grad,
            partial_q,
            partial_k,
            grad_v,
            partial_g,
            partial_beta,
            grad_state,
        ),
        *(*_sizes(*inputs[:3]), batch, settings.factor(width), part_length),
        NORMALIZE=settings.normalize,
        CUT=documents is not None,
        HAS_DFINAL=grad_final is not None,
        **constants,
    )
    grad_q, grad_k = (
        _through_norm(
            # Sum over column blocks, then over the value heads that share a key head.
            partial.sum(0).unflatten(2, (groups, heads // groups)).sum(3),
            x,
            settings.normalize,
        )
        for partial, x in ((partial_q, q), (partial_k, k))
    )
    grad_g, grad_beta = partial_g.sum(0).to(g.dtype), partial_beta.sum(0).to(beta.dtype)
    grad_initial = grad.new_empty((0,) * 4) if state is None else grad_state.to(state.dtype)
    return needed_grads(grad_mask, (grad_q, grad_k, grad_v, grad_g, grad_beta, grad_initial))


def _through_norm(pull: Tensor, x: Tensor, normalize: bool) -> Tensor:
    """Back-propagate through the normalization of x (..., D); the result has x's dtype.

    y = x · r with r = 1 / √(Σx² + eps), so dx = r · (dy - y · ⟨y, dy⟩).
    """
    if normalize:
        wide = x.to(pull.dtype)
        root = torch.rsqrt(wide.square().sum(-1, keepdim=True) + NORM_EPS)
        normal = wide * root
        pull = root * (pull - normal * (normal * pull).sum(-1, keepdim=True))
    return pull.to(x.dtype)


def _with_unit_strides(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Return q, k, v with unit last stride, the rest contiguous; q is the placeholder for None."""
    q = tensors[0]
    assert q is not None
    return tuple(
        q if tensor is None else with_unit_stride(tensor) if index < 3 else tensor.contiguous()
        for index, tensor in enumerate(tensors)
    )


def _part_length(positions: int) -> int:
    """Return the number of positions between two saved states."""
    return min(
        power_of_two(isqrt(positions)), MAX_POSITIONS
    )  # √S minimizes saved states plus scratch


def _sizes(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    """Return positions, heads, value heads per key head, widths, and the strides of q, k and v."""
    shape = (v.shape[1], v.shape[2], v.shape[2] // q.shape[2], q.shape[3], v.shape[3])
    return (*shape, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3])


def _tiles(v: Tensor, constants: dict[str, int]) -> int:
    return len(v) * v.shape[2] * blocks(v.shape[3], constants["BV"])


def _constants(kernel: TunedKernel, key: TableKey, width: int) -> dict[str, int]:
    return {**kernel.values(key, width), "BD": power_of_two(width)}


def entries(chip: str, dtype: str) -> Iterator[Entry]:
    """Yield the kernels of an ahead-of-time library: head dims 64 and 128, one document or more."""
    key = TableKey(chip, DTYPES[dtype])
    common: dict[str, Any] = {"i32": "DOCUMENTS", "limits": {"width": "BD"}, "extra": ("batch",)}
    for width in (64, 128):
        for cut in (False, True):
            flags = {"NORMALIZE": True, "CUT": cut}
            detail = f"{width}{'_documents' * cut}"
            for save in (False, True):
                yield entry(
                    "gated_delta_rule",
                    f"{KERNELS}.delta_forward",
                    dtype,
                    f"{detail}{'_saving' * save}",
                    {**_constants(FORWARD, key, width), **flags, "HAS_STATE": False, "SAVE": save},
                    "batch * heads * cdiv(out_width, BV)",
                    fp32="G BETA STATE FINAL SAVED scale",
                    **common,
                )
            yield entry(
                "gated_delta_rule",
                f"{KERNELS}.delta_backward",
                dtype,
                detail,
                {**_constants(BACKWARD, key, width), **flags, "HAS_DFINAL": False},
                "batch_count * heads * cdiv(out_width, BV)",
                fp32="G BETA SAVED SCRATCH DFINAL DQ DK DG DBETA DSTATE scale",
                **{**common, "extra": ()},
            )


_rule = opaque(
    CONTRACT,
    "triton",
    forward=_forward,
    fake=_fake,
    backward=_backward,
    saves=("q", "k", "v", "g", "beta", "documents", "state"),
)

IMPLEMENTATION = on_gpu(
    CONTRACT,
    "keeps the state in registers; saves only its inputs",
    tuned=TUNED,
    entries=entries,
    refuses=narrow_heads,
    run=gated_delta_rule,
)
