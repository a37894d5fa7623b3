"""Which backend calls get: force one, or ask why one is taken."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ms_kernels.contracts.contract import Contract
from ms_kernels.core.choice import Choice, with_launches
from ms_kernels.core.dispatch import PREFERRED, decide, describe_call
from ms_kernels.errors import ArgumentError, BackendError
from ms_kernels.operators import BACKENDS, CONTRACTS


def contract_of(name: str) -> Contract:
    """Return an operator's contract by its name.

    Raises:
        BackendError: when there is none.
    """
    if name not in CONTRACTS:
        raise BackendError(f"there is no operator {name!r}; there are {', '.join(CONTRACTS)}")
    return CONTRACTS[name]


def check_backends(names: Iterable[str]) -> None:
    """Refuse names that are no backend's.

    Raises:
        BackendError: when there is no such backend.
    """
    for name in names:
        if name not in BACKENDS:
            raise BackendError(f"there is no backend {name!r}; there are {', '.join(BACKENDS)}")


@contextmanager
def use_backend(*names: str) -> Iterator[None]:
    """Take only the named backends, in this order, for the calls within.

    The first that can take a call gets it, whether or not a tuning table says that it pays.

    It holds for the current thread or task. A block that is recomputed in a backward pass runs
    outside, unless the backward pass runs inside as well.

    Args:
        names: such as ``"reference"``, or ``"cpu", "reference"``; a call that none of them
            takes raises.

    Raises:
        BackendError: when there is no such backend.
    """
    check_backends(names)
    if not names:
        raise BackendError(f"use_backend needs a name; there are {', '.join(BACKENDS)}")
    token = PREFERRED.set(names)
    try:
        yield
    finally:
        PREFERRED.reset(token)


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
    contract = contract_of(op)
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
