"""The operators of one chip as a library, built ahead of time on a machine without that chip."""

from ms_kernels.aot.building import build
from ms_kernels.aot.loading import Library, load
from ms_kernels.aot.targets import TARGETS

__all__ = ["TARGETS", "Library", "build", "load"]
