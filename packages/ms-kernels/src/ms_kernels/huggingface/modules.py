"""Replacements for the modules of transformers' models: norms, feed-forward units, rotations.

A module keeps its weights and its place in the model; only its class becomes a subclass with
another `forward`, of the same name, so names in files and in wrapping policies stay valid. A
module is replaced if its `forward` and ours agree on random input, and is left alone otherwise.
That test decides, instead of a list of families, because families differ in details such as
Gemma's weights, which are offsets from 1.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ms_kernels.operators.geglu.operator import geglu
from ms_kernels.operators.layer_norm.operator import layer_norm
from ms_kernels.operators.rms_norm.operator import rms_norm
from ms_kernels.operators.rotary.operator import rotary
from ms_kernels.operators.swiglu.operator import swiglu

Forward = Callable[..., Any]

ROTATION = "apply_rotary_pos_emb"
"""Name of the function that rotates queries and keys, in the model's source file."""


def replacement(module: nn.Module) -> Forward | None:
    """Return an equivalent `forward` built from our operators; None if nothing equivalent exists.

    Args:
        module: a module whose weights are not on the meta device.
    """
    if _is_patched(type(module)):
        return None
    for candidate in (*_norms(module), *_feed_forwards(module)):
        if _agree(module, candidate):
            return candidate
    return _rotating_forward(type(module))  # type: ignore[arg-type]  # classes are hashable


def replace_forward(module: nn.Module, forward: Forward) -> None:
    """Make the module's class a subclass of the same name with this `forward`."""
    module.__class__ = _subclass(type(module), forward)  # type: ignore[arg-type]  # as above


def restore_forward(module: nn.Module) -> None:
    """Undo `replace_forward`."""
    if _is_patched(type(module)):
        module.__class__ = type(module).__mro__[1]


def _is_patched(module_class: type) -> bool:
    return "_ms_kernels_forward" in vars(module_class)


@cache
def _subclass(module_class: type, forward: Forward) -> type:
    members = {
        "forward": forward,
        "_ms_kernels_forward": True,
        "__module__": module_class.__module__,
        "__qualname__": module_class.__qualname__,
        "__doc__": module_class.__doc__,
    }
    return type(module_class.__name__, (module_class,), members)


def _norms(module: nn.Module) -> Iterator[Forward]:
    """Iterate over candidates for a module with a weight (H,) and an epsilon."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 1:
        return
    if type(module) is nn.LayerNorm:
        yield _layer_norm
    elif "RMSNorm" in type(module).__name__:
        for attribute in ("variance_epsilon", "eps"):
            if isinstance(getattr(module, attribute, None), float):
                yield _rms_norm(attribute, from_one=False)
                yield _rms_norm(attribute, from_one=True)


def _layer_norm(self: nn.LayerNorm, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
    return layer_norm(input, self.weight, self.bias, self.eps)


@cache
def _rms_norm(attribute: str, *, from_one: bool) -> Forward:
    """Return a forward that calls `rms_norm`.

    Args:
        attribute: the module's attribute with the epsilon.
        from_one: weights are offsets from 1, as in Gemma.
    """

    def forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
        weight: Tensor = self.weight  # type: ignore[assignment]
        weight = 1.0 + weight.float() if from_one else weight
        return rms_norm(hidden_states, weight, getattr(self, attribute))

    return forward


def _feed_forwards(module: nn.Module) -> Iterator[Forward]:
    """Iterate over candidates for a feed-forward unit of three projections."""
    if all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
        yield from (_by_swiglu, _by_geglu, _by_tanh_geglu)


def _by_swiglu(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-any-return]


def _by_geglu(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(geglu(self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-any-return]


def _by_tanh_geglu(self: Any, x: Tensor) -> Tensor:
    gated = geglu(self.gate_proj(x), self.up_proj(x), approximate="tanh")
    return self.down_proj(gated)  # type: ignore[no-any-return]


def _agree(module: nn.Module, forward: Forward) -> bool:
    """Check that a module's forward and its replacement agree on 4 random rows.

    The bound is four roundings of the module's dtype, relative to the largest value.
    """
    weight = next(module.parameters())
    width = weight.shape[-1]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1, 4, width, generator=generator).to(weight.device, weight.dtype)
    with torch.no_grad():
        try:
            expected, result = module(rows), forward(module, rows)
        except Exception:  # a module with other arguments is left alone
            return False
    if not isinstance(expected, Tensor) or expected.shape != result.shape:
        return False
    bound = 4 * torch.finfo(weight.dtype).eps * expected.float().abs().max().clamp_min(1e-6)
    return bool((expected.float() - result.float()).abs().max() <= bound)


@cache
def _rotating_forward(module_class: type) -> Forward | None:
    """Return the forward of an attention class with `rotary` in place of its own rotation.

    The class's code runs unchanged; only the name of the rotation is bound to ours, in a copy of
    the function, so that nothing in transformers is changed.
    """
    forward = inspect.unwrap(module_class.forward)  # type: ignore[attr-defined]
    if not isinstance(forward, FunctionType) or ROTATION not in forward.__code__.co_names:
        return None
    theirs = forward.__globals__.get(ROTATION)
    ours = next((ours for ours in (_rotate, _rotate_pairs) if _rotate_alike(theirs, ours)), None)
    if ours is None:
        return None
    changed = FunctionType(
        forward.__code__,
        {**forward.__globals__, ROTATION: ours},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    changed.__kwdefaults__ = forward.__kwdefaults__
    return changed


def _rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Rotate as `apply_rotary_pos_emb` of Llama.

    Args:
        q: (B, Hq, S, D), or (B, S, Hq, D) with ``unsqueeze_dim=2``.
        k: (B, Hk, S, D), or (B, S, Hk, D).
        cos: (B or 1, S, R); both halves of the last dim are equal.
        sin: same shape.
        unsqueeze_dim: 1 or 2.
    """
    return _rotated(q, k, cos, sin, unsqueeze_dim, interleaved=False)


def _rotate_pairs(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Rotate as `apply_rotary_pos_emb` of GLM, which rotates pairs of neighboring features."""
    return _rotated(q, k, cos, sin, unsqueeze_dim, interleaved=True)


def _rotated(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int, *, interleaved: bool
) -> tuple[Tensor, Tensor]:
    half = cos.shape[-1] // 2
    angles = (cos[..., :half].float(), sin[..., :half].float())
    if unsqueeze_dim == 2:
        return rotary(q, k, *angles, interleaved=interleaved)
    q, k = rotary(q.transpose(1, 2), k.transpose(1, 2), *angles, interleaved=interleaved)
    return q.transpose(1, 2), k.transpose(1, 2)


def _rotate_alike(theirs: Any, ours: Forward) -> bool:
    """Check that two rotations agree on random heads, also with fewer rotated features."""
    if not callable(theirs):
        return False
    generator = torch.Generator().manual_seed(0)
    for width, rotated in ((8, 8), (8, 4)):
        q = torch.randn(2, 4, 5, width, generator=generator)
        k = torch.randn(2, 2, 5, width, generator=generator)
        angles = torch.randn(2, 5, rotated // 2, generator=generator).repeat(1, 1, 2)
        for unsqueeze_dim in (1, 2):
            heads = (q, k) if unsqueeze_dim == 1 else (q.transpose(1, 2), k.transpose(1, 2))
            arguments = (*heads, angles.cos(), angles.sin())
            try:
                expected = theirs(*arguments, unsqueeze_dim=unsqueeze_dim)
            except Exception:
                # Llama's function rotates all features of a head, and its models never ask for
                # fewer.
                if rotated < width:
                    continue
                return False
            result = ours(*arguments, unsqueeze_dim=unsqueeze_dim)
            if not all(
                torch.allclose(one, other, rtol=0, atol=1e-5)
                for one, other in zip(expected, result, strict=True)
            ):
                return False
    return True
