"""Runs calls: checks the arguments, chooses an implementation, and caches the decision.

A decision depends on the tensors' types, shapes, dtypes, devices, layouts and strides, the options,
and whether torch.func is active. The cache key holds everything that `describe_call` reads, so a
repeated call costs one dictionary lookup instead of the checks and the choice.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor

from ms_kernels.contracts.call import Call, TensorMeta
from ms_kernels.contracts.contract import Contract
from ms_kernels.contracts.transforms import transforms_active
from ms_kernels.core.chips import chip_of
from ms_kernels.core.choice import Choice, choose, first_fit
from ms_kernels.core.operator import OPERATORS
from ms_kernels.core.tracing import known_when_traced
from ms_kernels.errors import ArgumentError, BackendError

MAX_CACHED = 4096
"""Number of cached decisions; the cache is emptied when full, so new shapes cannot fill memory."""

PREFERRED: ContextVar[tuple[str, ...] | None] = ContextVar("preferred", default=None)
"""Backends forced by `use_backend`, in order. None: any backend."""

Result = TypeVar("Result")

_cache: dict[Any, Callable[..., Any]] = {}


def perform(
    contract: Contract, tensors: tuple[Tensor | None, ...], options: tuple[Any, ...]
) -> Result:  # type: ignore[type-var]  # the public function of each operator has the real type
    """Check a call, choose an implementation and run it.

    Raises:
        ArgumentError: if an argument violates the contract.
        BackendError: if no allowed backend supports the call.
    """
    run: Callable[..., Result] = implementation(contract, tensors, options)
    if contract.check_values is not None:
        contract.check_values(*tensors, *options)
    if contract.explain_error is None:
        return run(*tensors, *options)
    try:
        return run(*tensors, *options)
    except (IndexError, RuntimeError):
        contract.explain_error(*tensors, *options)
        raise


def implementation(
    contract: Contract, tensors: tuple[Tensor | None, ...], options: tuple[Any, ...]
) -> Callable[..., Any]:
    """Return the function that implements `contract` for these arguments.

    Raises:
        ArgumentError: if an argument violates the contract.
        BackendError: if no allowed backend supports the call.
    """
    if torch.compiler.is_compiling():
        return _traced(contract, tensors, options)
    key: tuple[Any, ...] | None
    try:
        key = (
            contract.name,
            PREFERRED.get(),
            transforms_active(),
            options,
            *map(type, options),  # 1, 1.0 and True hash alike but are different values
            *[
                tensor
                if tensor is None
                else (
                    type(tensor),
                    tensor.shape,
                    tensor.dtype,
                    tensor.device,
                    tensor.layout,  # a sparse COO tensor has strides too, all 0
                    tensor.stride(),
                )
                for tensor in tensors
            ],
        )
        run = _cache.get(key)
    except (AttributeError, RuntimeError, TypeError):  # not a tensor, or unhashable: refused below
        key = run = None
    if run is None:
        run = decide(describe_call(contract, tensors, options)).implementation.run
        if len(_cache) >= MAX_CACHED:
            _cache.clear()
        if key is not None:
            _cache[key] = run
    return run


def decide(call: Call) -> Choice:
    """Check `call` and choose its implementation, respecting `use_backend`.

    Raises:
        ArgumentError: if an argument violates the contract.
        BackendError: if no allowed backend supports the call.
    """
    operator = OPERATORS[call.operator]
    operator.contract.bind(call)
    return choose(call, operator.implementations, PREFERRED.get())


def describe_call(
    contract: Contract,
    tensors: tuple[Tensor | None, ...],
    options: tuple[Any, ...],
    compiling: bool = False,
) -> Call:
    """Describe a call by metadata alone: shapes, dtypes, devices, strides and options.

    Raises:
        ArgumentError: if an argument is not a dense tensor.
    """
    metas: list[TensorMeta | None] = []
    for argument, tensor in zip(contract.arguments, tensors, strict=True):
        if tensor is None:
            metas.append(None)
            continue
        if not isinstance(tensor, Tensor):
            got = f"a {type(tensor).__name__}"  # type: ignore[unreachable]
            raise ArgumentError(contract.name, argument.name, got, "a torch.Tensor")
        if tensor.layout != torch.strided:
            got = f"laid out as {tensor.layout}"
            raise ArgumentError(contract.name, argument.name, got, "a strided (dense) tensor")
        plain = type(tensor) in (Tensor, torch.nn.Parameter)
        shape = tuple(tensor.shape)
        metas.append(TensorMeta(shape, tensor.dtype, tensor.device, tensor.stride(), plain))
    chip = next((chip_of(meta.device) for meta in metas if meta is not None), "")
    return Call(contract.name, tuple(metas), options, compiling, chip, transforms_active())


def _traced(
    contract: Contract, tensors: tuple[Tensor | None, ...], options: tuple[Any, ...]
) -> Callable[..., Any]:
    """Choose without the cache, in a form that torch.compile traces without a graph break."""
    call = describe_call(contract, tensors, options, compiling=True)
    contract.bind(call)
    preferred: tuple[str, ...] | None = _preferred_when_traced()
    candidate = first_fit(call, OPERATORS[contract.name].implementations, preferred)
    if candidate is None:
        raise BackendError(
            f"{contract.name}: none of {preferred} supports this call under torch.compile"
        )
    return candidate.run


@known_when_traced
def _preferred_when_traced() -> tuple[str, ...] | None:
    """Backends forced by `use_backend` when the graph is traced; constant within that graph."""
    return PREFERRED.get()
