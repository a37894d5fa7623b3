"""Assembles each operator from its folder, and keeps them by name."""

from collections.abc import Iterable
from importlib import import_module
from pkgutil import iter_modules

from attrs import frozen

from ms_kernels.contracts.contract import Contract
from ms_kernels.core.choice import Implementation

BACKENDS = ("ascend", "cpu", "sdpa", "triton", "reference")
"""Names of the backends; where several take a call, the first of them gets it."""


@frozen(kw_only=True, eq=False)
class Operator:
    """One operator: what it is, and everything that performs it."""

    contract: Contract
    implementations: tuple[Implementation, ...]
    """Best first; the reference, which takes every call, is the last."""


OPERATORS: dict[str, Operator] = {}
"""Every operator by name; importing `ms_kernels.operators` fills it."""


def register(folder: str, path: Iterable[str]) -> None:
    """Make the operator of a folder known to dispatch, proofs, the tuner and the library builder.

    Its module `contract` holds the CONTRACT, and each module that is named after a backend that
    backend's IMPLEMENTATION.

    Args:
        folder: the package's name.
        path: where it is.
    """
    contract: Contract = import_module(f"{folder}.contract").CONTRACT
    there = {each.name for each in iter_modules(path)}
    own = [import_module(f"{folder}.{name}") for name in BACKENDS if name in there - {"reference"}]
    reference = Implementation(
        operator=contract.name,
        backend="reference",
        run=contract.reference,
        subclasses=True,
        transforms=True,
        merit="plain torch, runs on every device and dtype",
    )
    implementations = (*(module.IMPLEMENTATION for module in own), reference)
    OPERATORS[contract.name] = Operator(contract=contract, implementations=implementations)
