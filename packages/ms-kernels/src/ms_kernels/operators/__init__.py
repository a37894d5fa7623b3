"""The operators, one folder per operator; importing this package registers every folder.

A folder holds `operator` (the public function), `contract` (the operator's definition with its
reference implementation), and one module per backend that implements it: `ascend`, `cpu`, `sdpa`,
or `triton` with its device code in `kernels`.
"""

from importlib import import_module
from pkgutil import iter_modules

from ms_kernels.core.operator import BACKENDS, OPERATORS, register

__all__ = ["BACKENDS", "CONTRACTS", "IMPLEMENTATIONS", "OPERATORS"]

for _folder in iter_modules(__path__, f"{__name__}."):
    register(_folder.name, import_module(_folder.name).__path__)

CONTRACTS = {name: operator.contract for name, operator in OPERATORS.items()}
"""Contract of every operator, by name."""

IMPLEMENTATIONS = tuple(
    implementation for operator in OPERATORS.values() for implementation in operator.implementations
)
"""All implementations, grouped by operator, in order of preference."""
