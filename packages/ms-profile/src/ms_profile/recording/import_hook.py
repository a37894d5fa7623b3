"""Call a function right after a module has been imported by any code."""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_imported(name: str, callback: Callable[[], None]) -> None:
    """Call `act` right after module `name` is first imported, or now if it already is.

    This leaves it to the script when torch is imported, and with which environment variables.
    """
    if name in sys.modules:
        callback()
    else:
        # First, as the finder that succeeds ends the search.
        sys.meta_path.insert(0, _Finder(name, callback))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, callback: Callable[[], None]) -> None:
        self.name, self.callback = name, callback
        self._searching = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.name or self._searching:
            return None
        self._searching = True  # the search below asks this finder again
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching = False
        # A script may search for a module without importing it, or import it later.
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._imported)
        return spec

    def _imported(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self.callback()


class _Loader(importlib.abc.Loader):
    """Wrap a loader to call a function once its module has been executed."""

    def __init__(self, loader: importlib.abc.Loader, callback: Callable[[], None]) -> None:
        self.loader, self.callback = loader, callback

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The real loader is restored first, as the module may inspect its loader while it executes.
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        module.__loader__ = self.loader
        self.loader.exec_module(module)
        self.callback()
