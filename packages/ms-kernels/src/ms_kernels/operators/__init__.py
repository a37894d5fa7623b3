"""The operators, a folder each; every folder here is found and registered on import.

A folder holds `operator` (the public function), `contract` (what the operator is, with its slow
truth), and a module for each backend that has an implementation of its own: `ascend`, `cpu`,
`sdpa`, or `triton` with its device code in `kernels`.
"""

from importlib import import_module
from pkgutil import iter_modules

from ms_kernels.core.operator import BACKENDS, OPERATORS, register

__all__ = ["BACKENDS", "CONTRACTS", "IMPLEMENTATIONS", "OPERATORS"]

for _folder in iter_modules(__path__, f"{__name__}."):
    register(_folder.name, import_module(_folder.name).__path__)

CONTRACTS = {name: each.contract for name, each in OPERATORS.items()}
"""What each operator is, by name."""

IMPLEMENTATIONS = tuple(
    implementation for each in OPERATORS.values() for implementation in each.implementations
)
"""Every implementation; those of one operator best first."""
