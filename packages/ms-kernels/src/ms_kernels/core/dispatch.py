"""Performs calls: checks them, chooses an implementation, and keeps what was decided.

A decision depends on the tensors' types, shapes, dtypes, devices, layouts and strides, the options,
and whether torch.func is active. The next call that looks the same pays for one dictionary lookup,
and neither checks nor chooses again. The key holds everything that `describe_call` reads.
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

KEPT = 4096
"""Decisions kept before they are forgotten, so that ever new shapes cannot fill the memory."""

PREFERRED: ContextVar[tuple[str, ...] | None] = ContextVar("preferred", default=None)
"""The backends that `use_backend` named; None for any."""

Result = TypeVar("Result")

_kept: dict[Any, Callable[..., Any]] = {}


def perform(
    contract: Contract, tensors: tuple[Tensor | None, ...], options: tuple[Any, ...]
) -> Result:  # type: ignore[type-var]  # what an operator returns, its public function says
    """Check a call, choose an implementation and run it.

    Raises:
        ArgumentError: when an argument does not fit the contract.
        BackendError: when no backend that may be used takes the call.
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
    """Return the function that performs `contract` on these arguments.

    Raises:
        ArgumentError: when an argument does not fit the contract.
        BackendError: when no backend that may be used takes the call.
    """
    if torch.compiler.is_compiling():
        return _traced(contract, tensors, options)
    steady = options
    for place, option in contract.changing:
        contract.check_option(option, options[place])
        steady = (*steady[:place], None, *steady[place + 1 :])
    key: tuple[Any, ...] | None
    try:
        key = (
            contract.name,
            PREFERRED.get(),
            transforms_active(),
            steady,
            *map(_type_of, steady),  # 1, 1.0 and True are one key, and not one value
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
        run = _kept.get(key)
    except (AttributeError, RuntimeError, TypeError):  # no tensor or no hash: refused below
        key = run = None
    if run is None:
        run = decide(describe_call(contract, tensors, options)).implementation.run
        if len(_kept) >= KEPT:
            _kept.clear()
        if key is not None:
            _kept[key] = run
    return run


def _type_of(option: Any) -> Any:
    """Return the type of an option, and those of its items if it is a tuple."""
    return tuple(map(_type_of, option)) if type(option) is tuple else type(option)


def decide(call: Call) -> Choice:
    """Check `call` and choose among all implementations, minding `use_backend`.

    Raises:
        ArgumentError: when an argument does not fit the contract.
        BackendError: when no backend that may be used takes the call.
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
    """Describe a use of an operator without its data.

    Raises:
        ArgumentError: when an argument is no dense tensor.
    """
    described: list[TensorMeta | None] = []
    for argument, tensor in zip(contract.arguments, tensors, strict=True):
        if tensor is None:
            described.append(None)
            continue
        if not isinstance(tensor, Tensor):
            got = f"a {type(tensor).__name__}"  # type: ignore[unreachable]
            raise ArgumentError(contract.name, argument.name, got, "a torch.Tensor")
        if tensor.layout != torch.strided:
            got = f"laid out as {tensor.layout}"
            raise ArgumentError(contract.name, argument.name, got, "a strided (dense) tensor")
        plain = type(tensor) in (Tensor, torch.nn.Parameter)
        shape = tuple(tensor.shape)
        described.append(TensorMeta(shape, tensor.dtype, tensor.device, tensor.stride(), plain))
    chip = next((chip_of(each.device) for each in described if each is not None), "")
    return Call(contract.name, tuple(described), options, compiling, chip, transforms_active())


def _traced(
    contract: Contract, tensors: tuple[Tensor | None, ...], options: tuple[Any, ...]
) -> Callable[..., Any]:
    """Decide anew, in a form that torch.compile follows without a graph break."""
    call = describe_call(contract, tensors, options, compiling=True)
    contract.bind(call)
    preferred: tuple[str, ...] | None = _preferred_when_traced()
    fitting = first_fit(call, OPERATORS[contract.name].implementations, preferred)
    if fitting is None:
        raise BackendError(
            f"{contract.name}: none of {preferred} takes this call while torch.compile traces it"
        )
    return fitting.run


@known_when_traced
def _preferred_when_traced() -> tuple[str, ...] | None:
    """Return what `use_backend` holds as the graph is made; it stays so in that graph."""
    return PREFERRED.get()
