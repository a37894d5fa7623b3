"""Mixed precision: float32 masters and gradients, computation in bfloat16 or float16."""

import logging
from functools import wraps
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.func import functional_call

from ms_parallel.models.decoder import Decoder
from ms_parallel.models.plan import ModelPlan
from ms_parallel.split.precision_choice import MixedPrecision, precision_name

logger = logging.getLogger(__name__)
SLOWDOWN_TO_WARN = 1.5
"""Ratio of bfloat16 to float32 time to warn at; about 0.5 on CPUs with bfloat16 matmul."""


def precision_policy(mixed_precision: MixedPrecision) -> MixedPrecisionPolicy:
    """Return FSDP2's policy: cast weights when gathering, reduce gradients in float32."""
    if not mixed_precision:
        return MixedPrecisionPolicy()
    dtype = getattr(torch, precision_name(mixed_precision))
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)


def cast_hidden_states(block: nn.Module, dtype: torch.dtype) -> None:
    """Cast a block's hidden states, its first input, to the compute dtype before each forward.

    FSDP2's `cast_forward_inputs` casts every floating-point input: it would also round the float32
    tables of rotary positions, float masks and router weights.
    """

    def cast(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The first input is positional or, in some blocks, a keyword argument.
        name = None if args else next(iter(kwargs), None)
        hidden = args[0] if args else kwargs.get(name or "")
        if not isinstance(hidden, Tensor) or not hidden.is_floating_point():
            return None
        if name is None:
            return (hidden.to(dtype), *args[1:]), kwargs
        return args, {**kwargs, name: hidden.to(dtype)}

    block.register_forward_pre_hook(cast, with_kwargs=True)


def compute_in(stage: Decoder, plan: ModelPlan, dtype: torch.dtype) -> None:
    """Compute an unsharded model on one process in `dtype`; its weights stay float32.

    Each block casts its weights where it uses them, so that torch.compile fuses the casts, and
    gradients leave the backward pass in float32. FSDP would copy both once more.
    """
    stage.compute_dtype = dtype
    blocks = tuple(f"{name}." for name, _ in stage.named_modules() if plan.is_block(name))
    for name, module in stage.named_modules():
        own_weights = any(True for _ in module.parameters(recurse=False))
        if plan.is_block(name) or (own_weights and not name.startswith(blocks)):
            _cast_weights_of(module, dtype)


def _cast_weights_of(module: nn.Module, dtype: torch.dtype) -> None:
    """Wrap a module's forward to cast the module's weights to `dtype`."""
    original = _OriginalForward(module)
    cached: dict[str, Tensor] = {}
    versions: dict[str, int] = {}
    module.weights_in_compute_dtype = cached  # type: ignore[assignment]

    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            cast = {name: weight.to(dtype) for name, weight in original.named_parameters()}
        else:  # generation, for example, runs many forward passes on the same weights
            cast = cached_weights()
        return functional_call(original, cast, args, kwargs)

    def cached_weights() -> dict[str, Tensor]:
        weights = dict(original.named_parameters())
        # In-place updates by the optimizer increase a weight's version.
        current = {name: weight._version for name, weight in weights.items()}
        if not cached or current != versions:
            cached.update({name: weight.to(dtype) for name, weight in weights.items()})
            versions.update(current)
        return cached

    module.forward = wraps(module.forward)(forward)


class _OriginalForward(nn.Module):
    """Calls a module's original forward, without its hooks, and gives access to its weights."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.original = module.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs)


def warn_of_slow_bfloat16(device: torch.device) -> None:
    """Warn if bfloat16 is slower than float32, as on most laptop CPUs.

    Measures the speed, which takes a few milliseconds, since no list of CPUs stays complete.
    """
    if device.type != "cpu":
        return
    # The measured ratio is not shown: a few milliseconds under load give a different one each time.
    if bfloat16_slowdown() > SLOWDOWN_TO_WARN:
        logger.warning(
            "warning: mixed_precision is slow here: this processor has no bfloat16 matrix product,"
            " so bfloat16 takes longer than float32; set mixed_precision to false"
        )


def bfloat16_slowdown() -> float:
    """Measure the ratio of bfloat16 to float32 matmul time on this CPU."""
    return _seconds(torch.bfloat16) / _seconds(torch.float32)


def _seconds(dtype: torch.dtype) -> float:
    """Time a matrix product; the minimum of several runs, since other processes only add time."""
    x, weight = torch.ones(256, 256, dtype=dtype), torch.ones(256, 256, dtype=dtype)
    times = []
    for _ in range(5):
        start = perf_counter()
        torch.mm(x, weight)
        times.append(perf_counter() - start)
    return min(times)
