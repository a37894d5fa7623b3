"""A family of models as one value; each is a file of `families/`, found there by its `FAMILY`."""

import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import nn

from ms_parallel.errors import ModelError
from ms_parallel.models.config import ModelConfig
from ms_parallel.models.plan import ModelPlan
from ms_parallel.operators.protocol import Ops

__all__ = ["Family", "families", "family_of"]


class Family(Protocol):
    """What a family knows: its configuration, its model, its plan, and its config.json.

    A module of `families/` that has one as `FAMILY` is known everywhere.
    """

    @property
    def name(self) -> str:
        """The `model_type` in config.json, and what users call it."""

    @property
    def config(self) -> type[Any]:
        """The class of its configurations."""

    @property
    def default(self) -> Mapping[str, object]:
        """Settings of a small model, which trains on a laptop."""

    def build(
        self, config: Any, *, ops: Ops | None, layers: range | None, first: bool, last: bool
    ) -> nn.Module:
        """The `StagedModel` or one stage of it, with unset weights."""

    def plan(self, config: Any, /) -> ModelPlan:
        """How the model may be split."""

    def read(self, document: Mapping[str, Any], /) -> ModelConfig:
        """Understand a config.json, decoded.

        Raises:
            ModelError: a setting is missing, or asks for something that the model does not do.
            ConfigError: a value is out of range.
        """

    def write(self, config: Any, dtype: torch.dtype, /) -> dict[str, object]:
        """The config.json of a configuration, with weights of `dtype`."""


@cache
def families() -> tuple[Family, ...]:
    """Every family, in the order of the names of their files."""
    room = import_module("ms_parallel.models.families")
    names = sorted(module.name for module in pkgutil.iter_modules(room.__path__))
    return tuple(import_module(f"{room.__name__}.{name}").FAMILY for name in names)


def family_of(config: ModelConfig) -> Family:
    """The family of a configuration.

    Raises:
        ModelError: no model has this kind of configuration.
    """
    for family in families():
        if type(config) is family.config and config.model_type == family.name:
            return family
    raise ModelError(
        f"no model is built from a {type(config).__name__}; give a configuration of `architecture`"
    )
