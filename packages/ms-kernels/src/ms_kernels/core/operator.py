"""Registry of operators, each assembled from its folder."""

from collections.abc import Iterable
from importlib import import_module
from pkgutil import iter_modules

from attrs import frozen

from ms_kernels.contracts.contract import Contract
from ms_kernels.core.choice import Implementation

BACKENDS = ("ascend", "cpu", "sdpa", "triton", "reference")
"""Names of the backends, in order of preference."""


@frozen(kw_only=True, eq=False)
class Operator:
    """One operator: its contract and its implementations."""

    contract: Contract
    implementations: tuple[Implementation, ...]
    """Best first; the last is the reference, which supports every call."""


OPERATORS: dict[str, Operator] = {}
"""All operators by name; filled by importing `ms_kernels.operators`."""


def register(folder: str, path: Iterable[str]) -> None:
    """Register the operator in a folder for dispatch, tests, the tuner and the library builder.

    Its module `contract` defines CONTRACT, and each module named after a backend defines that
    backend's IMPLEMENTATION.

    Args:
        folder: name of the operator's Python package.
        path: the package's `__path__`.
    """
    contract: Contract = import_module(f"{folder}.contract").CONTRACT
    names = {module.name for module in iter_modules(path)} - {"reference"}
    backends = [import_module(f"{folder}.{name}") for name in BACKENDS if name in names]
    reference = Implementation(
        operator=contract.name,
        backend="reference",
        run=contract.reference,
        subclasses=True,
        transforms=True,
        merit="plain torch, runs on every device and dtype",
    )
    implementations = (*(module.IMPLEMENTATION for module in backends), reference)
    OPERATORS[contract.name] = Operator(contract=contract, implementations=implementations)
