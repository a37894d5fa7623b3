"""What each command of `ms-kernels` does: a skin over one function, printed as text or as JSON."""

from ms_kernels.commands.library import build
from ms_kernels.commands.operators import explain, list_operators
from ms_kernels.commands.proof import check
from ms_kernels.commands.timing import bench

__all__ = ["bench", "build", "check", "explain", "list_operators"]
