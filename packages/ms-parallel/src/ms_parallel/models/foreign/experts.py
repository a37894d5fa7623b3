"""Experts of transformers whose stacked matrices can be split over tensor ranks."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ms_parallel.models.foreign.around import Around

MATRICES = 2
"""Gate and up, side by side in one parameter."""


class Experts(Around):
    """Experts whose gate and up are two matrices of one parameter (E, 2, I, H).

    Transformers has them one below the other, (E, 2·I, H), half of which is not half of each. Held
    apart, either is split over I as any other matrix, and files and checkpoints are the same under
    every layout. The inner forward is given them as it knows them, this process's part of each.

    Args:
        inner: transformers' experts.
        packed: names of those parameters.
    """

    def __init__(self, inner: nn.Module, packed: tuple[str, ...]) -> None:
        super().__init__(inner)
        self.__dict__["packed"] = packed
        for name in packed:
            whole = inner._parameters[name]
            assert whole is not None
            apart = whole.detach().view(whole.shape[0], MATRICES, -1, whole.shape[2])
            inner._parameters[name] = nn.Parameter(apart, requires_grad=whole.requires_grad)

    def forward(self, *args: Any, **named: Any) -> Any:
        """As the inner module."""
        views = {name: self._view(name, value) for name, value in self.named_parameters()}
        return torch.func.functional_call(self.inner, views, args, named)

    def _view(self, name: str, value: Any) -> Tensor:
        local: Tensor = value.to_local() if hasattr(value, "to_local") else value
        return local.flatten(1, 2) if name in self.packed else local


def unpack(model: Any, published: Mapping[str, str] | None) -> None:
    """Replace the experts of a model whose published plan packs their parameters, in place."""
    prefix = f"{model.base_model_prefix}."
    for name, module in list(model.named_modules()):
        pattern = re.sub(r"\.\d+(?=\.|$)", ".*", name).removeprefix(prefix)
        styles = {own: (published or {}).get(f"{pattern}.{own}") for own in module._parameters}
        packed = tuple(own for own, style in styles.items() if style == "packed_colwise")
        if packed and all(module._parameters[own].ndim == 3 for own in packed):
            parent, _, last = name.rpartition(".")
            model.get_submodule(parent)._modules[last] = Experts(module, packed)
