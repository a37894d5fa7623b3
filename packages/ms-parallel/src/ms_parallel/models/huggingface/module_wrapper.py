"""Base class for wrapper modules that keep the parameter names of the wrapped module."""

from typing import Any, Self

from torch import nn


class ModuleWrapper(nn.Module):
    """Wrapper that shares the wrapped module's dicts of submodules, parameters and buffers.

    Parameters therefore keep their names, and both modules see a parameter that tensor
    parallelism, FSDP or `to_empty` replaces.

    Args:
        inner: wrapped module; not registered as a submodule, but its submodules are.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        for table in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[table] = inner.__dict__[table]
        self.__dict__["inner"] = inner
        self.training = inner.training

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the inner module too, as it is not registered as a submodule."""
        self.inner.training = mode
        return super().train(mode)

    def __getattr__(self, name: str) -> Any:
        """Look up submodules and parameters, then attributes of the inner module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["inner"], name)
