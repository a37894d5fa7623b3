"""Backend selection: force a backend, or explain the choice."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ms_kernels.contracts.contract import Contract
from ms_kernels.core.choice import Choice, with_launches
from ms_kernels.core.dispatch import PREFERRED, decide, describe_call
from ms_kernels.errors import ArgumentError, BackendError, shown
from ms_kernels.operators import BACKENDS, CONTRACTS


def contract_of(name: str) -> Contract:
    """Return the contract of an operator.

    Raises:
        BackendError: if no operator has this name.
    """
    if not isinstance(name, str) or name not in CONTRACTS:
        raise BackendError(f"unknown operator {shown(name)}; use one of {', '.join(CONTRACTS)}")
    return CONTRACTS[name]


def check_backends(names: Iterable[str]) -> None:
    """Check that every name is a known backend.

    Raises:
        BackendError: if a name is unknown.
    """
    for name in names:
        if not isinstance(name, str) or name not in BACKENDS:
            raise BackendError(f"unknown backend {shown(name)}; use one of {', '.join(BACKENDS)}")


@contextmanager
def use_backend(*names: str) -> Iterator[None]:
    """Use only the named backends, in this order of preference, inside the `with` block.

    The first backend that supports a call runs it, even if a tuning table says that it is slower
    at that size.

    The setting is local to the current thread or async task. Blocks recomputed in a backward pass
    are outside the `with` block unless the backward pass is inside it too.

    Args:
        names: backends such as ``"reference"``, or ``"cpu", "reference"``. A call that none of
            them supports raises BackendError.

    Raises:
        BackendError: if a name is unknown, or no name is passed.
    """
    check_backends(names)
    if not names:
        raise BackendError(f"use_backend needs at least one of {', '.join(BACKENDS)}")
    token = PREFERRED.set(names)
    try:
        yield
    finally:
        PREFERRED.reset(token)


def explain(op: str, *tensors: Tensor | None, **arguments: Any) -> Choice:
    """Report which implementation a call would use and why, without running it.

    Args:
        op: name of the operator, such as ``"rms_norm"``.
        *tensors: tensor arguments in signature order, or by keyword. Only shape, dtype, device
            and strides matter, so tensors on the ``meta`` device work.
        **arguments: the remaining arguments, by name.

    Returns:
        The choice: the `backend`, a `verdict` with a reason for each implementation considered,
        and the `launches`, i.e. each kernel's launch parameters and the chip's table they are from.

    Raises:
        ArgumentError: if an argument violates the contract.
        BackendError: if the operator is unknown, or no backend supports the call.
    """
    contract = contract_of(op)
    tensor_names = [argument.name for argument in contract.arguments]
    names = [*tensor_names, *(option.name for option in contract.options)]
    values = dict(zip(tensor_names, tensors, strict=False)) | arguments
    for name in values:
        if name not in names:
            raise ArgumentError(op, name, "not one of its arguments", f"one of {', '.join(names)}")
    arguments_in_order = tuple(values.get(name) for name in tensor_names)
    options = tuple(values.get(option.name, option.default) for option in contract.options)
    call = describe_call(contract, arguments_in_order, options)
    return with_launches(decide(call), call, contract.bind(call))
