"""Why a call gets the implementation that it gets."""

from typing import Any

from torch import Tensor

from ms_kernels.dispatch import CONTRACTS, decide, describe_call
from ms_kernels.errors import ArgumentError, BackendError
from ms_kernels.registry import Choice, with_launches

__all__ = ["explain"]


def explain(op: str, *tensors: Tensor | None, **arguments: Any) -> Choice:
    """Say which implementation a call gets and why, without performing it.

    Args:
        op: name of the operator, such as ``"rms_norm"``.
        *tensors: its tensor arguments in the order of its signature, here or by name. Tensors on
            the ``meta`` device will do; what counts are shape, dtype, device and strides.
        **arguments: its other arguments, by name.

    Returns:
        The choice: `backend`, `verdicts` with a reason for each implementation considered, and
        `launches`, the block sizes and the like that its kernels run with, and which table of
        which chip says so.

    Raises:
        ArgumentError: when an argument does not fit the contract.
        BackendError: when there is no such operator, or no backend takes the call.
    """
    contract = CONTRACTS.get(op)
    if contract is None:
        raise BackendError(f"there is no operator {op!r}; there are {', '.join(CONTRACTS)}")
    given = dict(zip((each.name for each in contract.arguments), tensors, strict=False))
    given |= arguments
    names = [each.name for each in contract.arguments]
    names += [each.name for each in contract.options]
    for name in given:
        if name not in names:
            raise ArgumentError(op, name, "no argument of it", f"one of {', '.join(names)}")
    places = tuple(given.get(each.name) for each in contract.arguments)
    options = tuple(given.get(each.name, each.default) for each in contract.options)
    call = describe_call(contract, places, options)
    return with_launches(decide(call), call, contract.bind(call))
