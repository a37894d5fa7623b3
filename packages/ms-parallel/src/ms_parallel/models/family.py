"""Model families as values; each module in `families/` defines one as `FAMILY`."""

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
from ms_parallel.models.experts.router_config import Mixture
from ms_parallel.models.plan import ModelPlan
from ms_parallel.models.weight_names import WeightRules
from ms_parallel.operators.protocol import Ops

ANY = ""
"""Name of the family that accepts any `model_type`."""


@frozen(kw_only=True)
class Family:
    """Model family: configuration, model, parallel plan, and config.json format.

    Modules anywhere under `families/` register a family by defining it as `FAMILY`. config.json has
    one key per setting, with the same name, unless `read` and `write` are overridden.
    """

    name: str
    """`model_type` in config.json, and the name for users."""
    config: type[Any]
    """Configuration class."""
    model: Callable[..., nn.Module]
    """Builds the `StagedModel` from (config, ops=, layers=, first=, last=)."""
    plan: Callable[[Any], ModelPlan]
    """Returns the parallel plan of a configuration."""
    weights: Callable[[Any], WeightRules] = lambda _: {}
    """Returns rules for parameters whose names or shapes differ from the checkpoint tensors."""
    layer_kind: Callable[[Any, int], Hashable] = lambda *_: None
    """Key from (config, layer index); layers with equal keys have the same parameter shapes."""
    small: Mapping[str, object] = field(factory=dict)
    """Settings of a small model that trains on a laptop."""
    packs: bool = True
    """Whether a document's logits are independent of its offset in a packed row."""
    needs_whole_rows: str = ""
    """Reason why context parallelism is not supported; empty if it is."""

    @property
    def default(self) -> Mapping[str, object]:
        """Settings of the small model that have no default."""
        return self.small

    def build(self, config: Any, *, ops: Ops | None, **part: Any) -> nn.Module:
        """Build the model or one of its stages, with uninitialized weights."""
        return self.model(config, ops=ops or operators, **part)

    def shapes(
        self, config: Any, named: Callable[[nn.Module], Iterable[tuple[str, torch.Tensor]]]
    ) -> dict[str, torch.Size] | None:
        """Return shapes by name of all tensors that `named` yields; None to build the layers."""
        return None

    def check_layout(self, config: Any, layout: Layout) -> None:
        """Check that the model supports a layout.

        Raises:
            LayoutError: it does not; names the axis and the reason.
        """
        layout.check_model(config.shape)
        self.check_context(layout)
        self.check_experts(config, layout)

    def check_context(self, layout: Layout) -> None:
        """Check that the model supports the layout's context parallelism.

        Raises:
            LayoutError: it does not; gives the reason.
        """
        if layout.context > 1 and self.needs_whole_rows:
            raise LayoutError(
                f"context={layout.context} cannot split the rows of {self.name or 'this model'}:"
                f" {self.needs_whole_rows}; set context=1 and use data ranks instead"
            )

    def check_experts(self, config: Any, layout: Layout) -> None:
        """Check that the expert axis divides the number of experts.

        Raises:
            LayoutError: it does not, or the model is dense.
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
                f"expert={layout.expert} must divide the model's {experts} experts; use"
                f" {', '.join(fits)}"
            )

    def read(self, document: Mapping[str, Any]) -> ModelConfig:
        """Build the configuration from a decoded config.json.

        Raises:
            ModelError: a setting is missing or not supported.
            ConfigError: a value is out of range.
        """
        names = {setting.name for setting in fields(self.config)}
        settings = {key: value for key, value in document.items() if key != "torch_dtype"}
        # Missing and unknown keys are both errors; token ids are optional.
        for key in sorted((names - set(TOKENS)) ^ (settings.keys() - set(TOKENS))):
            problem = "lacks" if key in names else "has unknown"
            raise ModelError(f"config.json {problem} {key[:60]!r}")
        ids = {name: token_ids(name, settings.get(name)) for name in TOKENS}
        config: ModelConfig = self.config(**{**settings, **ids})
        return config

    def write(self, config: Any, dtype: torch.dtype) -> dict[str, object]:
        """Return the content of config.json for weights of `dtype`."""
        return {"torch_dtype": str(dtype).removeprefix("torch."), **asdict(config)}


@cache
def _all_families() -> tuple[Family, ...]:
    """Import every module in `families/` and return their families, sorted by name."""
    package = import_module("ms_parallel.models.families")
    infos = pkgutil.walk_packages(package.__path__, prefix=f"{package.__name__}.")
    modules = [import_module(info.name) for info in infos if not info.ispkg]
    return tuple(sorted((module.FAMILY for module in modules), key=lambda family: family.name))


@cache
def families() -> tuple[Family, ...]:
    """Return all native families, sorted by name."""
    return tuple(family for family in _all_families() if family.name != ANY)


def transformers_family() -> Family:
    """Return the family of models built by transformers."""
    return next(family for family in _all_families() if family.name == ANY)


def family_of(config: ModelConfig) -> Family:
    """Return the family of a configuration.

    Raises:
        ModelError: no family has this configuration class.
    """
    for family in _all_families():
        if type(config) is family.config and family.name in (config.model_type, ANY):
            return family
    raise ModelError(
        f"no model family has the configuration class {type(config).__name__}; use a configuration"
        " from `architecture`"
    )
