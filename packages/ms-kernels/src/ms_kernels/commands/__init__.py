"""Commands of `ms-kernels`: each calls one function and prints the result as text or JSON."""

from ms_kernels.commands.bench import bench
from ms_kernels.commands.build import build
from ms_kernels.commands.check import check
from ms_kernels.commands.operators import explain, list_operators

__all__ = ["bench", "build", "check", "explain", "list_operators"]
