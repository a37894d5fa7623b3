"""The gated delta rule step by step, the state in registers; nothing is held between the passes.

The backward pass walks forward once to keep a state for each root of the positions, then back.
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

LONGEST = 64
"""Positions between two states that are kept, at most: so many go back and forth to memory."""

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


def gated_delta_rule(*given: Any) -> Tensor | tuple[Tensor, Tensor]:
    """Return what each position's query reads, and perhaps the state after the last one."""
    found: tuple[Tensor, Tensor] = _rule(*given)
    return found if given[-1] else found[0]


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
    _walk((q, k, v, g, beta, documents, state), options, result, final, None)
    return result, final


def _fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(v.shape), _sums(q, len(q), v.shape[2], q.shape[3], v.shape[3])


def _sums(near: Tensor, *sizes: int) -> Tensor:
    """Return a float32 tensor, not initialized, on the device of `near`."""
    return near.new_empty(sizes, dtype=torch.float32)


def _walk(
    tensors: tuple[Tensor | None, ...],
    options: tuple[Any, ...],
    result: Tensor,
    final: Tensor,
    saved: Tensor | None,
) -> None:
    """Go through the positions; write results and the final state, or the states to be kept."""
    q, k, v, g, beta, documents, state = _laid_out(*tensors)
    constants = _constants(FORWARD, key_of(q), q.shape[3])
    launch(
        f"{KERNELS}.delta_forward",
        _tiles(v, constants),
        q,
        *(q, k, v, g, beta, documents, state, result, final, final if saved is None else saved),
        *(*_sizes(q, k, v), RuleOptions(*options).factor(q.shape[3]), _share(q.shape[1])),
        NORMALIZE=options[1],
        CUT=tensors[5] is not None,
        GIVEN=tensors[6] is not None,
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
    settings, share = RuleOptions(*options), _share(q.shape[1])
    batch, positions, heads, out_width = v.shape
    width, groups = q.shape[3], q.shape[2]
    to_state = _sums(q, batch, heads, width, out_width)
    parts = blocks(positions, share)
    saved = _sums(q, batch, heads, parts, width, out_width)
    _walk((q, k, v, g, beta, documents, state), options, grad, to_state, saved)
    constants = _constants(BACKWARD, key_of(q), width)
    tiles, columns = _tiles(v, constants), blocks(out_width, constants["BV"])
    room = _sums(q, tiles, share, constants["BD"], constants["BV"])
    to_q, to_k = _sums(q, 2, columns, batch, positions, heads, width)
    to_g, to_beta = _sums(q, 2, columns, batch, positions, heads)
    to_v = empty(v)
    near = _laid_out(q, k, v, g, beta, documents)
    pulled = to_state if grad_final is None else grad_final
    launch(
        f"{KERNELS}.delta_backward",
        tiles,
        q,
        *(*near, saved, room, grad, pulled, to_q, to_k, to_v, to_g, to_beta, to_state),
        *(*_sizes(*near[:3]), batch, settings.factor(width), share),
        NORMALIZE=settings.normalize,
        CUT=documents is not None,
        PULLED=grad_final is not None,
        **constants,
    )
    of_q, of_k = (
        _through_norm(
            of.sum(0).unflatten(2, (groups, heads // groups)).sum(3), x, settings.normalize
        )
        for of, x in ((to_q, q), (to_k, k))
    )
    of_g, of_beta = to_g.sum(0).to(g.dtype), to_beta.sum(0).to(beta.dtype)
    of_state = grad.new_empty((0,) * 4) if state is None else to_state.to(state.dtype)
    return needed_grads(grad_mask, (of_q, of_k, to_v, of_g, of_beta, of_state))


def _through_norm(pull: Tensor, x: Tensor, normalize: bool) -> Tensor:
    """Return the gradient of x (..., D) for that of x at length 1, in x's dtype.

    y = x · r with r = 1 / √(Σx² + eps), so dx = r · (dy - y · ⟨y, dy⟩).
    """
    if normalize:
        wide = x.to(pull.dtype)
        root = torch.rsqrt(wide.square().sum(-1, keepdim=True) + NORM_EPS)
        normal = wide * root
        pull = root * (pull - normal * (normal * pull).sum(-1, keepdim=True))
    return pull.to(x.dtype)


def _laid_out(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Return q, k, v and others as kernels walk them; any tensor will do where there is none."""
    q = tensors[0]
    assert q is not None
    return tuple(
        q if each is None else with_unit_stride(each) if place < 3 else each.contiguous()
        for place, each in enumerate(tensors)
    )


def _share(positions: int) -> int:
    """Return how many positions lie between two states that are kept."""
    return min(power_of_two(isqrt(positions)), LONGEST)


def _sizes(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    """Return positions, heads, value heads a key head, widths, and three strides of each."""
    shape = (v.shape[1], v.shape[2], v.shape[2] // q.shape[2], q.shape[3], v.shape[3])
    return (*shape, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3])


def _tiles(v: Tensor, constants: dict[str, int]) -> int:
    return len(v) * v.shape[2] * blocks(v.shape[3], constants["BV"])


def _constants(kernel: TunedKernel, key: TableKey, width: int) -> dict[str, int]:
    return {**kernel.values(key, width), "BD": power_of_two(width)}


def entries(chip: str, dtype: str) -> Iterator[Entry]:
    """Yield what a library holds: heads of 64 and 128 features, of one document and of several."""
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
                    {**_constants(FORWARD, key, width), **flags, "GIVEN": False, "SAVE": save},
                    "batch * heads * cdiv(out_width, BV)",
                    fp32="G BETA STATE FINAL SAVED scale",
                    **common,
                )
            yield entry(
                "gated_delta_rule",
                f"{KERNELS}.delta_backward",
                dtype,
                detail,
                {**_constants(BACKWARD, key, width), **flags, "PULLED": False},
                "batch_count * heads * cdiv(out_width, BV)",
                fp32="G BETA SAVED ROOM DFINAL DQ DK DG DBETA DSTATE scale",
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
    "the state stays in registers, step by step; nothing is held between the passes",
    tuned=TUNED,
    entries=entries,
    refuses=narrow_heads,
    run=gated_delta_rule,
)
