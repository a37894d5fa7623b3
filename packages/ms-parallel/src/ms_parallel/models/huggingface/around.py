"""Wrapper module whose parameters keep the names of the wrapped module."""

from typing import Any, Self

from torch import nn


class Around(nn.Module):
    """Wrapper that shares the wrapped module's tables of submodules, parameters and buffers.

    Every parameter therefore keeps its name, and both modules see the same object after a tensor
    split, FSDP or `to_empty` replaces it.

    Args:
        inner: wrapped module; it is not registered as a submodule, but its submodules are.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        for table in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[table] = inner.__dict__[table]
        self.__dict__["inner"] = inner
        self.training = inner.training

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the inner module too, which is not a submodule."""
        self.inner.training = mode
        return super().train(mode)

    def __getattr__(self, name: str) -> Any:
        """Look up submodules and parameters, then attributes of the inner module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["inner"], name)
