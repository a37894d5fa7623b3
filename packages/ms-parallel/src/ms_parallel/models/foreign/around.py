"""A module around another whose parameters keep their names."""

from typing import Any, Self

from torch import nn


class Around(nn.Module):
    """Shares the tables of parts of the module that it stands around.

    So every parameter bears the name that it has there, and is the same object whoever replaces it:
    a split over tensor ranks, FSDP, or `to_empty`.

    Args:
        inner: what is called in the end; it is not a part, as its parts are.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        for table in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[table] = inner.__dict__[table]
        self.__dict__["inner"] = inner
        self.training = inner.training

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the inner module too, which is no part."""
        self.inner.training = mode
        return super().train(mode)

    def __getattr__(self, name: str) -> Any:
        """Look up parts, and else what the inner module has."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["inner"], name)
