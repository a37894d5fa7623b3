"""A family of models as one value; each is a file of `families/`, found there by its `FAMILY`."""

import pkgutil
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import cache
from importlib import import_module
from typing import Any

import torch
from attrs import asdict, field, fields, frozen
from torch import nn

from ms_parallel import operators
from ms_parallel.cluster.layout import Layout
from ms_parallel.errors import LayoutError, ModelError
from ms_parallel.models.config import TOKENS, ModelConfig, token_ids
from ms_parallel.models.experts.choice import Mixture
from ms_parallel.models.plan import ModelPlan
from ms_parallel.models.weight_names import Rules
from ms_parallel.operators.protocol import Ops

ANY = ""
"""The name of a family of any `model_type`."""


@frozen(kw_only=True)
class Family:
    """What a family knows: its configuration, its model, its plan, and its config.json.

    A module of `families/`, or of a folder in it, that has one as `FAMILY` is known everywhere. In
    config.json its settings stand by their own names, unless `read` and `write` say otherwise.
    """

    name: str
    """The `model_type` in config.json, and what users call it."""
    config: type[Any]
    """The class of its configurations."""
    model: Callable[..., nn.Module]
    """Builds the `StagedModel` of (config, ops=, layers=, first=, last=)."""
    plan: Callable[[Any], ModelPlan]
    """How the model of a configuration may be split."""
    weights: Callable[[Any], Rules] = lambda _: {}
    """How a folder's tensors make up the parameters of a configuration's model, where they do not
    bear the same names."""
    layer_kind: Callable[[Any, int], Hashable] = lambda *_: None
    """What tells layers with other parameters apart, of (config, layer's number)."""
    small: Mapping[str, object] = field(factory=dict)
    """Settings of a small model, which trains on a laptop."""
    packs: bool = True
    """Whether a document has the same logits in a packed row as alone, wherever it stands."""

    needs_whole_rows: str = ""
    """Why the context axis cannot share out its rows; empty where it can."""

    @property
    def default(self) -> Mapping[str, object]:
        """All settings of the small model that have no default."""
        return self.small

    def build(self, config: Any, *, ops: Ops | None, **part: Any) -> nn.Module:
        """Build the model or one stage of it, with unset weights."""
        return self.model(config, ops=ops or operators, **part)

    def shapes(
        self, config: Any, named: Callable[[nn.Module], Iterable[tuple[str, torch.Tensor]]]
    ) -> dict[str, torch.Size] | None:
        """Map what is `named` in the whole model to its shapes; None to build a block a kind."""
        return None

    def check_layout(self, config: Any, layout: Layout) -> None:
        """Check that a layout asks for nothing that the model cannot do.

        Raises:
            LayoutError: names what does not fit.
        """
        layout.check_model(config.shape)
        self.check_context(layout)
        self.check_experts(config, layout)

    def check_context(self, layout: Layout) -> None:
        """Check that the context axis can share out the rows.

        Raises:
            LayoutError: it cannot; says why.
        """
        if layout.context > 1 and self.needs_whole_rows:
            raise LayoutError(
                f"context={layout.context} cannot share out rows of {self.name or 'this model'}:"
                f" {self.needs_whole_rows}; set context=1 and give its processes to data"
            )

    def check_experts(self, config: Any, layout: Layout) -> None:
        """Check that the expert axis has experts to share out, as many for each process.

        Raises:
            LayoutError: it has not; says why.
        """
        if layout.expert == 1:
            return
        mixture: Mixture | None = getattr(config, "mixture", None)
        if mixture is None or not mixture.layers:
            raise LayoutError(
                f"expert={layout.expert} needs a mixture of experts, and {config.model_type} is"
                " dense; set expert=1"
            )
        experts = mixture.choice.num_experts
        if experts % layout.expert:
            fits = [str(n) for n in range(1, experts + 1) if experts % n == 0]
            raise LayoutError(
                f"expert={layout.expert} does not divide the model's {experts} experts; values that"
                f" fit: {', '.join(fits)}"
            )

    def read(self, document: Mapping[str, Any]) -> ModelConfig:
        """Understand a config.json, decoded.

        Raises:
            ModelError: a setting is missing, or asks for something that the model does not do.
            ConfigError: a value is out of range.
        """
        names = {setting.name for setting in fields(self.config)}
        known = {key: value for key, value in document.items() if key != "torch_dtype"}
        for key in sorted((names - set(TOKENS)) ^ (known.keys() - set(TOKENS))):
            problem = "lacks" if key in names else "has unknown"
            raise ModelError(f"config.json {problem} {key[:60]!r}")
        ids = {name: token_ids(name, known.get(name)) for name in TOKENS}
        config: ModelConfig = self.config(**{**known, **ids})
        return config

    def write(self, config: Any, dtype: torch.dtype) -> dict[str, object]:
        """Return the content of a configuration's config.json, with weights of `dtype`."""
        return {"torch_dtype": str(dtype).removeprefix("torch."), **asdict(config)}


@cache
def _found() -> tuple[Family, ...]:
    """Import every file of `families/` and list what they define, sorted by name."""
    room = import_module("ms_parallel.models.families")
    found = pkgutil.walk_packages(room.__path__, prefix=f"{room.__name__}.")
    modules = [import_module(module.name) for module in found if not module.ispkg]
    return tuple(sorted((module.FAMILY for module in modules), key=lambda family: family.name))


@cache
def families() -> tuple[Family, ...]:
    """List every family of our own, sorted by name."""
    return tuple(family for family in _found() if family.name != ANY)


def foreign() -> Family:
    """Find the family of what transformers builds, whatever its `model_type`."""
    return next(family for family in _found() if family.name == ANY)


def family_of(config: ModelConfig) -> Family:
    """Find the family of a configuration.

    Raises:
        ModelError: no model has this kind of configuration.
    """
    for family in _found():
        if type(config) is family.config and family.name in (config.model_type, ANY):
            return family
    raise ModelError(
        f"no model is built from a {type(config).__name__}; give a configuration of `architecture`"
    )
