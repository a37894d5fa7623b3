"""Schedule generators by placement, one family per file; importing this package registers all."""

from importlib import import_module
from pkgutil import walk_packages

for _file in walk_packages(__path__, f"{__name__}."):
    import_module(_file.name)
