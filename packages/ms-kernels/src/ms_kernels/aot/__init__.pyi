from .building import build
from .loading import Library, load
from .targets import TARGETS

__all__ = ["TARGETS", "Library", "build", "load"]
