"""Any optimizer of `torch.optim`, selected by the name of its class."""

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from attrs import field, frozen
from torch.optim import Optimizer

from ms_parallel.errors import ConfigError
from ms_parallel.optim.optimizer import OptimizerConfig, OptimizerKind
from ms_parallel.optim.rule import LocalParameters, UpdateRule
from ms_parallel.optim.torch_rule import PartsRule, is_elementwise
from ms_parallel.settings import nearest, short_repr

OURS = ("params", "lr", "weight_decay", "foreach", "fused", "capturable", "differentiable")
"""Arguments that are not settings, or that are set elsewhere."""


def _class(value: Any) -> Any:
    return getattr(torch.optim, value, value) if isinstance(value, str) else value


@frozen(kw_only=True)
class TorchConfig(OptimizerConfig):
    """Settings of a torch optimizer; weight decay is always decoupled.

    Raises:
        ConfigError: `kind` is not an optimizer class, rejects the settings, or cannot be used here.
    """

    kind: type[Optimizer] = field(converter=_class)
    """Optimizer class or its name in `torch.optim`; needs unsharded weights if not elementwise."""
    settings: Mapping[str, Any] = field(factory=dict)
    """Constructor arguments other than `lr` and `weight_decay`."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if not (isinstance(self.kind, type) and issubclass(self.kind, Optimizer)):
            raise ConfigError(f"kind must be a class of torch.optim, got {short_repr(self.kind)}")
        keys = keys_of(self.kind)
        for key in self.settings:
            if key not in keys:
                raise ConfigError(
                    f"optimizer {self.kind.__name__!r} has unknown setting {short_repr(key)};"
                    f" {nearest(str(key), keys)}"
                )
        try:
            # Called for its errors: the class may reject the settings.
            is_elementwise(partial(_build, self))
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"optimizer {self.kind.__name__!r} cannot be used: {str(error).splitlines()[0]}"
            ) from error

    def rules(self, params: LocalParameters) -> list[UpdateRule]:
        """Build a rule per parameter group, separately for matrices and vectors."""
        return [
            PartsRule(params, group, partial(_build, group.config), self.kind.__name__)
            for group in self.parameter_groups(params)
        ]


def _build(config: TorchConfig, tensors: Any) -> Optimizer:
    settings = {k: tuple(v) if isinstance(v, list) else v for k, v in config.settings.items()}
    # The rule decays weights itself, decoupled and with the scheduled rate.
    without = {"weight_decay": 0.0} if "weight_decay" in _arguments(config.kind) else {}
    optimizer_class: Any = config.kind
    optimizer: Optimizer = optimizer_class(tensors, lr=1.0, **without, **settings)
    return optimizer


def _arguments(kind: type[Optimizer]) -> list[str]:
    return list(inspect.signature(kind).parameters)


def keys_of(kind: type[Optimizer]) -> tuple[str, ...]:
    """Return the settings of a torch optimizer class, without those shared by all optimizers."""
    return tuple(name for name in _arguments(kind) if name not in OURS)


def _kind(kind: type[Optimizer]) -> OptimizerKind:
    keys = keys_of(kind)

    def build(**options: Any) -> TorchConfig:
        settings = {key: options.pop(key) for key in keys if key in options}
        return TorchConfig(kind=kind, settings=settings, **options)

    return OptimizerKind(build=build, keys=(*keys, "groups"))


OTHERS = {
    name: _kind(kind)
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
}
