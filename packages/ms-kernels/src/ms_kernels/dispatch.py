"""From a call's tensors to the function that performs it; what was decided is kept.

A decision depends on shapes, dtypes, devices, strides and options alone, so the next call that
looks the same pays for one dictionary lookup, and neither checks nor chooses again.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from ms_kernels import ascend, cpu, reference, sdpa, triton
from ms_kernels.contract import Call, Contract, Fact
from ms_kernels.errors import ArgumentError, BackendError
from ms_kernels.registry import Choice, Implementation, choose, first_fit
from ms_kernels.tracing import known_when_traced
from ms_kernels.tuning import chip_of

__all__ = [
    "BACKENDS",
    "CONTRACTS",
    "IMPLEMENTATIONS",
    "decide",
    "describe_call",
    "implementation",
    "use_backend",
]

CONTRACTS = reference.CONTRACTS
"""Every operator by name."""

IMPLEMENTATIONS: tuple[Implementation, ...] = (
    *ascend.IMPLEMENTATIONS,
    *cpu.IMPLEMENTATIONS,
    *sdpa.IMPLEMENTATIONS,
    *triton.IMPLEMENTATIONS,
    *reference.IMPLEMENTATIONS,
)
"""Every implementation, best first."""

BACKENDS = tuple(dict.fromkeys(each.backend for each in IMPLEMENTATIONS))
"""Names of the backends."""

KEPT = 4096
"""Decisions kept before they are forgotten, so that ever new shapes cannot fill the memory."""

_preferred: ContextVar[tuple[str, ...] | None] = ContextVar("preferred", default=None)
_kept: dict[Any, Callable[..., Any]] = {}


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
    for name in names:
        if name not in BACKENDS:
            raise BackendError(f"there is no backend {name!r}; there are {', '.join(BACKENDS)}")
    if not names:
        raise BackendError(f"use_backend needs a name; there are {', '.join(BACKENDS)}")
    token = _preferred.set(names)
    try:
        yield
    finally:
        _preferred.reset(token)


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
            _preferred.get(),
            steady,
            *map(type, steady),  # 1, 1.0 and True are one key, and not one value
            *[
                tensor
                if tensor is None
                else (type(tensor), tensor.shape, tensor.dtype, tensor.device, tensor.stride())
                for tensor in tensors
            ],
        )
        run = _kept.get(key)
    except (AttributeError, RuntimeError, TypeError):  # no tensor, no strides, no hash: told below
        key = run = None
    if run is None:
        run = decide(describe_call(contract, tensors, options)).implementation.run
        if len(_kept) >= KEPT:
            _kept.clear()
        if key is not None:
            _kept[key] = run
    return run


def decide(call: Call) -> Choice:
    """Check `call` and choose among all implementations, minding `use_backend`.

    Raises:
        ArgumentError: when an argument does not fit the contract.
        BackendError: when no backend that may be used takes the call.
    """
    CONTRACTS[call.operator].bind(call)
    return choose(call, IMPLEMENTATIONS, _preferred.get())


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
    facts: list[Fact | None] = []
    for argument, tensor in zip(contract.arguments, tensors, strict=True):
        if tensor is None:
            facts.append(None)
            continue
        if not isinstance(tensor, Tensor):
            got = f"a {type(tensor).__name__}"  # type: ignore[unreachable]
            raise ArgumentError(contract.name, argument.name, got, "a torch.Tensor")
        if tensor.layout != torch.strided:
            got = f"laid out as {tensor.layout}"
            raise ArgumentError(contract.name, argument.name, got, "a strided (dense) tensor")
        plain = type(tensor) in (Tensor, torch.nn.Parameter)
        shape = tuple(tensor.shape)
        facts.append(Fact(shape, tensor.dtype, tensor.device, tensor.stride(), plain))
    chip = next((chip_of(fact.device) for fact in facts if fact is not None), "")
    return Call(contract.name, tuple(facts), options, compiling, chip)


def _traced(
    contract: Contract, tensors: tuple[Tensor | None, ...], options: tuple[Any, ...]
) -> Callable[..., Any]:
    """Decide anew, in a form that torch.compile follows without a graph break."""
    call = describe_call(contract, tensors, options, compiling=True)
    contract.bind(call)
    preferred: tuple[str, ...] | None = _preferred_when_traced()
    fitting = first_fit(call, IMPLEMENTATIONS, preferred)
    if fitting is None:
        raise BackendError(
            f"{contract.name}: none of {preferred} takes this call while torch.compile traces it"
        )
    return fitting.run


@known_when_traced
def _preferred_when_traced() -> tuple[str, ...] | None:
    """Return what `use_backend` holds as the graph is made; it stays so in that graph."""
    return _preferred.get()
